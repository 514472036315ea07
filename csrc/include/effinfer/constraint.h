// What a request may say: a grammar, asked for a mask of tokens before each is drawn.
#pragma once

#include <cstdint>
#include <span>

namespace effinfer {

// The state of one request. The engine calls it between steps, from the thread that calls step(). A
// method that throws ends its request, with FinishReason::error.
class TokenConstraint {
 public:
  virtual ~TokenConstraint() = default;
  // Sets the bits of the tokens that may come next, token t in bit t % 32 of word t / 32, and
  // clears the others. `allowed` has a word for each 32 tokens of the model's vocabulary.
  virtual void fill(std::span<uint32_t> allowed) = 0;
  // Goes on by a token; false: it may not come next, and nothing has changed.
  virtual bool accept(int32_t token) = 0;
  // Takes back the tokens that were accepted last.
  virtual void rollback(int32_t count) = 0;
  // Whether nothing may follow: the request then ends, with FinishReason::stop.
  virtual bool ended() const = 0;
};

}  // namespace effinfer
