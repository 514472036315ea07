// Where the values of a call lie in a step. Lowering makes places, which are plain data: addresses
// in the arena, members of the batch, slots of what is planned. With a step at hand fill() turns
// them into the pointers and sizes of the call's problem; false: the call has nothing to do in it.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

#include "effinfer/compiler.h"
#include "effinfer/graph.h"
#include "executor/step.h"
#include "ops/attention.h"
#include "ops/attention_mass.h"
#include "ops/bucket_index.h"
#include "ops/elementwise.h"
#include "ops/embedding.h"
#include "ops/hash_index.h"
#include "ops/history_index.h"
#include "ops/matmul.h"
#include "ops/norm.h"
#include "ops/operand.h"
#include "ops/page_index.h"
#include "ops/prefill_index.h"
#include "ops/rope.h"
#include "ops/rope_append.h"
#include "ops/strided_index.h"

namespace effinfer::executor {

// Of a float value: in the arena, in a member's own, or in the caller's logits.
struct Floats {
  float* fixed = nullptr;  // null: the logits
  int64_t own = -1;        // offset, -1: none

  float* at(const Step& step) const;
};

// Of a matmul operand.
struct OperandPlace {
  ops::Operand largest;  // in the arena, with the rows of the largest step
  int64_t own = -1;

  ops::Operand at(const Step& step, int64_t rows) const;
};

// Of a graph input: in the batch.
struct Ids {
  std::span<const int32_t> Batch::* member = nullptr;

  const int32_t* at(const Step& step) const { return (step.batch->*member).data(); }
};

struct EmbeddingPlaces {
  Ids ids;
  Floats out;
  Dim rows;

  bool fill(ops::EmbeddingProblem& p, const Step& step) const;
};

struct SelectRowsPlaces {
  Floats x;
  Ids ids;
  Floats out;
  Dim rows;

  bool fill(ops::SelectRowsProblem& p, const Step& step) const;
};

struct UnaryPlaces {
  Floats x;
  Floats out;
  Dim rows;

  bool fill(ops::UnaryProblem& p, const Step& step) const;
};

struct BinaryPlaces {
  Floats a;
  Floats b;
  Floats out;
  Dim rows;
  int64_t cols = 0;

  bool fill(ops::BinaryProblem& p, const Step& step) const;
};

struct RmsNormPlaces {
  struct Sum {
    Floats add_to;
    Floats out;
  };

  Floats x;
  std::optional<Sum> sum;  // with the sum that is normed
  Floats out;
  std::optional<OperandPlace> out_operand;  // in place of `out`
  Dim rows;

  bool fill(ops::RmsNormProblem& p, const Step& step) const;
};

struct ToOperandPlaces {
  Floats x;
  OperandPlace out;
  Dim rows;

  bool fill(ops::ToOperandProblem& p, const Step& step) const;
};

struct MatmulPlaces {
  struct Part {
    Floats out;
    std::optional<Floats> residual;
  };

  OperandPlace x;
  std::array<Part, ops::kMaxMatmulParts> parts;
  size_t num_written = 0;                   // parts with an `out`
  std::optional<OperandPlace> out_operand;  // in place of parts
  bool is_head = false;                     // the step may want the highest outputs only
  Dim rows;

  bool fill(ops::MatmulProblem& p, const Step& step) const;
};

struct RopeTablePlaces {
  Ids positions;
  Floats out;
  Dim rows;

  bool fill(ops::RopeTableProblem& p, const Step& step) const;
};

struct RopePlaces {
  Floats x;
  Floats table;
  Floats out;
  Dim rows;

  bool fill(ops::RopeProblem& p, const Step& step) const;
};

// Of an append without queries and rotation.
struct KvAppendPlaces {
  Floats k;
  Floats v;
  size_t layer = 0;

  bool fill(ops::RopeAppendProblem& p, const Step& step) const;
};

struct RopeAppendPlaces {
  KvAppendPlaces kv;
  Floats q;
  std::optional<Floats> table;
  Floats q_out;

  bool fill(ops::RopeAppendProblem& p, const Step& step) const;
};

// Of a rope_append that may run inside attention. Tiles of several rows of a sequence read what
// others append: where there are such tiles the append is a call of its own.
struct EarlyAppendPlaces {
  RopeAppendPlaces append;
  size_t attention = 0;  // slot of the attention's shape

  bool fill(ops::RopeAppendProblem& p, const Step& step) const;
};

struct AttentionPlaces {
  // Of keys in chunks.
  struct ChunkQueries {
    Floats before;
    Floats far;
  };

  Floats q;
  size_t layer = 0;
  size_t shape = 0;               // slot of Step::attention
  std::optional<size_t> visits;   // slot of Step::visits
  std::optional<size_t> weights;  // of Shared::weight_names
  std::optional<ChunkQueries> chunks;
  std::optional<RopeAppendPlaces> append;  // that may run inside
  Floats out;
  std::optional<OperandPlace> out_operand;  // in place of `out`

  bool fill(ops::AttentionProblem& p, const Step& step) const;
};

// Of an index, which does nothing in a step without lists of its kind.
struct IndexPlaces {
  Floats q;
  size_t layer = 0;
  size_t visits = 0;  // slot of Step::visits

  bool fill(ops::ColumnIndexProblem& p, const Step& step) const { return fill(p.in, step); }
  bool fill(ops::BlockIndexProblem& p, const Step& step) const { return fill(p.in, step); }
  bool fill(ops::BucketIndexProblem& p, const Step& step) const;
  bool fill(ops::PageIndexProblem& p, const Step& step) const;
  bool fill(ops::HashIndexProblem& p, const Step& step) const;
  bool fill(ops::HistoryIndexProblem& p, const Step& step) const;
  bool fill(ops::StridedIndexProblem& p, const Step& step) const;

 private:
  bool fill(ops::PrefillIndexInputs& in, const Step& step) const;
  // What all indices are given.
  template <class Problem>
  void set(Problem& p, const Step& step) const;
};

// Of attention_mass, which do nothing in a step without rows for them.
struct AttentionMassPlaces {
  Floats q;
  size_t layer = 0;
  bool of_kept = false;  // the call behind attention, of steps in which that keeps its weights

  bool fill(ops::AttentionMassProblem& p, const Step& step) const;
};

}  // namespace effinfer::executor
