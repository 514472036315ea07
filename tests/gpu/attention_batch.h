// What the tests of attention on the GPU share: sequences whose keys, values and queries are known
// as float64, their pages, batches over them, and naive attention.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <numeric>
#include <optional>
#include <random>
#include <vector>

#include "core/float16.h"
#include "cpp/check.h"
#include "gpu/device_arrays.h"
#include "gpu/device_work.h"
#include "gpu/divided_pages.h"
#include "ops/attention.h"

namespace effinfer {

struct Heads {
  DType kv = DType::bf16;
  int32_t dims = 64;
  int32_t kv_heads = 1;
  int32_t group = 1;
  DType q = DType::f32;

  int32_t qo_heads() const { return kv_heads * group; }
};

// What decides a row's result beside its numbers.
struct Rules {
  bool causal = true;
  int32_t window_left = -1;
  int32_t sink_tokens = 0;
  float soft_cap = 0.0f;
  std::vector<float> slopes;
  std::vector<float> sinks;
  std::vector<float> first_logits = {};  // of sequences that have a plane
  int32_t chunk = 0;                     // of keys
};

// Queries for keys so many chunks away, 2: or more, have the same numbers in another order, and
// others that float16 scales otherwise.
inline int64_t query_dim(int distance, int64_t dim, int64_t dims) {
  return distance == 0 ? dim : distance == 1 ? dims - 1 - dim : (dim + dims / 2) % dims;
}
inline float query_factor(int distance) {
  return distance == 2 ? 4.0f : 1.0f;
}

inline size_t index_of(int64_t token, int64_t head, int64_t dim, int64_t heads, int64_t dims) {
  return static_cast<size_t>((token * heads + head) * dims + dim);
}

// A sequence's numbers as they are stored: i8 ones times their scales.
struct Sequence {
  int32_t length = 0;
  std::vector<float> k, v;              // [token][kv head][dim]
  std::vector<float> k_scale, v_scale;  // [token][kv head]; 1 but of i8
  std::vector<float> q;                 // [token][qo head][dim]
  std::vector<int32_t> pages;
};

class Cache {
 public:
  Cache(const Heads& heads, uint32_t seed) : heads_(heads), random_(seed) {}

  const Heads& heads() const { return heads_; }
  const Sequence& sequence(int index) const { return sequences_[static_cast<size_t>(index)]; }

  int add(int32_t length, bool exact_queries = true) {
    Sequence s;
    s.length = length;
    const int64_t rows = int64_t{length} * heads_.kv_heads;
    store(rows, s.k, s.k_scale);
    store(rows, s.v, s.v_scale);
    s.q = draw(int64_t{length} * heads_.qo_heads() * heads_.dims);
    if (exact_queries) {
      for (float& x : s.q) x = bf16_to_f32(f32_to_bf16(x));
    }
    sequences_.push_back(std::move(s));
    return static_cast<int>(sequences_.size()) - 1;
  }

  // Whose tokens are all alike.
  int add_constant(int32_t length) {
    const int one = add(length);
    Sequence& s = sequences_.back();
    for (std::vector<float>* values : {&s.k, &s.v, &s.q, &s.k_scale, &s.v_scale}) {
      const size_t width = values->size() / static_cast<size_t>(length);
      for (size_t i = width; i < values->size(); ++i) (*values)[i] = (*values)[i - width];
    }
    return one;
  }

  // The tokens of another sequence, in an order of their own.
  int add_tokens(int from, const std::vector<int32_t>& tokens) {
    const Sequence& source = sequences_[static_cast<size_t>(from)];
    Sequence s;
    s.length = static_cast<int32_t>(tokens.size());
    const int64_t kv = heads_.kv_heads;
    for (const int32_t token : tokens) {
      append(source.k, token, kv * heads_.dims, s.k);
      append(source.v, token, kv * heads_.dims, s.v);
      append(source.k_scale, token, kv, s.k_scale);
      append(source.v_scale, token, kv, s.v_scale);
      append(source.q, token, int64_t{heads_.qo_heads()} * heads_.dims, s.q);
    }
    sequences_.push_back(std::move(s));
    return static_cast<int>(sequences_.size()) - 1;
  }

  // To the device, on shuffled pages.
  void upload() {
    std::vector<int32_t> ids;
    for (const Sequence& s : sequences_) ids.resize(ids.size() + num_pages(s.length));
    std::iota(ids.begin(), ids.end(), 0);
    std::shuffle(ids.begin(), ids.end(), random_);
    const size_t page_bytes = page_numbers() * static_cast<size_t>(element_bytes());
    // Keys behind the last token may be anything; values are finite.
    std::vector<uint8_t> k(ids.size() * page_bytes, 0xff);
    std::vector<uint8_t> v(k.size(), 0);
    std::vector<float> k_scale(ids.size() * static_cast<size_t>(heads_.kv_heads * 64));
    std::vector<float> v_scale(k_scale.size());
    size_t next = 0;
    for (Sequence& s : sequences_) {
      for (size_t i = 0; i < num_pages(s.length); ++i) s.pages.push_back(ids[next++]);
      for (int32_t token = 0; token < s.length; ++token) {
        put_token(s, token, k, v, k_scale, v_scale);
      }
    }
    k_ = DeviceArray<uint8_t>(k);
    v_ = DeviceArray<uint8_t>(v);
    k_scale_ = DeviceArray<float>(k_scale);
    v_scale_ = DeviceArray<float>(v_scale);
  }

  // The device's pages of keys, on the host.
  std::vector<uint8_t> key_bytes() const { return k_.values(); }
  std::vector<uint8_t> value_bytes() const { return v_.values(); }
  std::vector<float> key_scales() const { return k_scale_.values(); }

  ops::KvLayer layer() const {
    return {heads_.kv, heads_.kv_heads, heads_.dims,     0, k_.data(),
            v_.data(), k_scale_.data(), v_scale_.data(), {}};
  }

 private:
  static size_t num_pages(int32_t length) { return static_cast<size_t>((length + 63) / 64); }
  size_t page_numbers() const { return static_cast<size_t>(64 * heads_.dims * heads_.kv_heads); }
  int element_bytes() const { return dtype_info(heads_.kv).block_bytes; }

  std::vector<float> draw(int64_t count) {
    std::normal_distribution<float> normal;
    std::vector<float> values(static_cast<size_t>(count));
    for (float& x : values) x = normal(random_);
    return values;
  }
  static void append(const std::vector<float>& from, int64_t token, int64_t count,
                     std::vector<float>& to) {
    to.insert(to.end(), from.begin() + token * count, from.begin() + (token + 1) * count);
  }

  void store(int64_t rows, std::vector<float>& values, std::vector<float>& scales) {
    values = draw(rows * heads_.dims);
    scales.assign(static_cast<size_t>(rows), 1.0f);
    for (size_t row = 0; row < scales.size(); ++row) {
      float* x = values.data() + row * static_cast<size_t>(heads_.dims);
      if (heads_.kv == DType::i8) scales[row] = std::abs(x[0]) * 0.01f + 0.02f;
      for (int d = 0; d < heads_.dims; ++d) {
        if (heads_.kv == DType::bf16) x[d] = bf16_to_f32(f32_to_bf16(x[d]));
        if (heads_.kv == DType::f16) x[d] = f16_to_f32(f32_to_f16(x[d]));
        if (heads_.kv == DType::i8) {
          x[d] = std::clamp(std::nearbyint(x[d] / scales[row]), -128.0f, 127.0f);
        }
      }
    }
  }

  void put(float x, int64_t element, uint8_t* to) const {
    if (heads_.kv == DType::f32) std::memcpy(to + 4 * element, &x, 4);
    if (heads_.kv == DType::i8) to[element] = static_cast<uint8_t>(static_cast<int8_t>(x));
    const uint16_t bits = heads_.kv == DType::f16 ? f32_to_f16(x) : f32_to_bf16(x);
    if (element_bytes() == 2) std::memcpy(to + 2 * element, &bits, 2);
  }

  void put_token(const Sequence& s, int32_t token, std::vector<uint8_t>& k, std::vector<uint8_t>& v,
                 std::vector<float>& k_scale, std::vector<float>& v_scale) const {
    const int64_t per_dword = 4 / element_bytes();
    const int64_t page = s.pages[static_cast<size_t>(token / 64)];
    for (int64_t head = 0; head < heads_.kv_heads; ++head) {
      const int64_t place = page * heads_.kv_heads + head;
      const int64_t bytes = place * 64 * heads_.dims * element_bytes();
      const size_t row = static_cast<size_t>(int64_t{token} * heads_.kv_heads + head);
      k_scale[static_cast<size_t>(place * 64 + token % 64)] = s.k_scale[row];
      v_scale[static_cast<size_t>(place * 64 + token % 64)] = s.v_scale[row];
      for (int64_t dim = 0; dim < heads_.dims; ++dim) {
        const size_t at = row * static_cast<size_t>(heads_.dims) + static_cast<size_t>(dim);
        put(s.k[at], ops::k_offset(token % 64, dim, heads_.dims, per_dword), k.data() + bytes);
        put(s.v[at], ops::v_offset(token % 64, dim, heads_.dims, per_dword), v.data() + bytes);
      }
    }
  }

  Heads heads_;
  std::mt19937 random_;
  std::vector<Sequence> sequences_;
  DeviceArray<uint8_t> k_, v_;
  DeviceArray<float> k_scale_, v_scale_;
};

// The last `rows` tokens of the first `length` of a sequence.
struct Part {
  int sequence;
  int32_t length;
  int32_t rows;
  std::vector<uint64_t> paths = {};               // of a tree
  int32_t tree_start = -1;                        // -1: where the rows begin
  std::vector<std::vector<uint64_t>> words = {};  // [block of 64 rows * kv_heads][word]: visits
  // Of as many lists, by slot: the logarithms of how often keys count; none: once.
  std::vector<std::vector<float>> log_weights = {};
  // [kv head][slot, to the end of a page]: a plane of the same, for all rows; none: there is none.
  std::vector<float> plane = {};
  bool unchunked = false;

  // Drafts count once, and nobody reads behind the last slot.
  template <class Random>
  void weigh_slots(Random& random, int32_t kv_heads) {
    const int32_t weighed = tree_start >= 0 ? tree_start : paths.empty() ? length : length - rows;
    for (int32_t head = 0; head < kv_heads; ++head) {
      for (int32_t slot = 0; slot < (length + 63) / 64 * 64; ++slot) {
        const auto weight = static_cast<float>(random() % 4);
        plane.push_back(slot < weighed ? weight : slot < length ? 0.0f : std::nanf(""));
      }
    }
  }

  // Anything for keys that are not visited.
  template <class Random>
  void weigh(Random& random) {
    for (const std::vector<uint64_t>& list : words) {
      std::vector<float>& to = log_weights.emplace_back();
      for (size_t slot = 0; slot < 64 * list.size(); ++slot) {
        const bool visited = (list[slot / 64] >> slot % 64 & 1) != 0;
        to.push_back(visited ? static_cast<float>(random() % 4) : std::nanf(""));
      }
    }
  }
};

struct Results {
  std::vector<float> out;  // [row][qo head][dim]
  std::vector<float> lse;  // [row][qo head]
};

// How a batch is run.
struct Launch {
  int32_t shares = 64;
  std::optional<ops::Arithmetic> operand = {};
  int32_t long_rows = 0;  // of tiles of prompts
  bool own_sums = false;  // as prompts in a phase of their own
  // Pages of KV heads that may be re-arranged first, however few tiles read them.
  int64_t arranged = 0;
  bool far = false;  // half of the pages are in memory of their own
};

class Batch {
 public:
  Batch(const Cache& cache, const Rules& rules, std::vector<Part> parts)
      : cache_(cache), heads_(cache.heads()), rules_(rules), parts_(std::move(parts)) {
    for (const Part& part : parts_) add(part);
  }

  int64_t num_rows() const { return qo_indptr_.back(); }
  const std::vector<Part>& parts() const { return parts_; }

  // Of this batch; the cache keeps those that were drawn.
  void scale_queries(float factor) {
    for (float& x : q_) x *= factor;
  }

  Results run(const Launch& how = {}) const;

 private:
  void add(const Part& part) {
    const Sequence& s = cache_.sequence(part.sequence);
    qo_indptr_.push_back(qo_indptr_.back() + part.rows);
    kv_len_.push_back(part.length);
    kv_indices_.insert(kv_indices_.end(), s.pages.begin(),
                       s.pages.begin() + (part.length + 63) / 64);
    kv_indptr_.push_back(static_cast<int32_t>(kv_indices_.size()));
    const auto width = static_cast<int64_t>(heads_.qo_heads()) * heads_.dims;
    q_.insert(q_.end(), s.q.begin() + (part.length - part.rows) * width,
              s.q.begin() + part.length * width);
    for (int32_t i = 0; i < part.rows; ++i) {
      paths_.push_back(part.paths.empty() ? 0 : part.paths[static_cast<size_t>(i)]);
    }
    tree_start_.push_back(part.tree_start >= 0 ? part.tree_start : part.length - part.rows);
    first_block_.push_back(part.words.empty() ? -1 : num_blocks_);
    for (const auto& list : part.words) {
      list_words_ = std::max(list_words_, static_cast<int64_t>(list.size()));
    }
    num_blocks_ += static_cast<int32_t>(part.words.size()) / heads_.kv_heads;
  }

  ops::AttentionShape shape(const Launch& how) const {
    ops::AttentionShape shape;
    shape.num_qo_heads = heads_.qo_heads();
    shape.num_kv_heads = heads_.kv_heads;
    shape.head_dim = heads_.dims;
    shape.causal = rules_.causal;
    shape.window_left = rules_.window_left;
    shape.sink_tokens = rules_.sink_tokens;
    shape.chunk = rules_.chunk;
    shape.visits = list_words_ > 0;
    shape.most_rows = 16;
    shape.long_rows = how.long_rows;
    shape.only_long = how.own_sums;
    shape.shares = how.shares;
    shape.most_arranged = how.arranged;
    shape.arranged_reads = 0;
    return shape;
  }
  void set_rules(ops::AttentionProblem& p) const {
    p.causal = rules_.causal;
    p.window_left = rules_.window_left;
    p.sink_tokens = rules_.sink_tokens;
    p.sm_scale = 1.0f / std::sqrt(static_cast<float>(heads_.dims));
    p.logits_soft_cap = rules_.soft_cap;
  }
  ops::BatchLayout host_layout() const {
    ops::BatchLayout layout;
    layout.num_tokens = num_rows();
    layout.num_sequences = static_cast<int64_t>(kv_len_.size());
    layout.qo_indptr = qo_indptr_.data();
    layout.kv_indptr = kv_indptr_.data();
    layout.kv_indices = kv_indices_.data();
    layout.kv_len = kv_len_.data();
    layout.ancestors = paths_.data();
    layout.tree_start = tree_start_.data();
    return layout;
  }
  std::vector<uint8_t> queries(int distance) const {
    const auto bytes = static_cast<size_t>(dtype_info(heads_.q).block_bytes);
    std::vector<uint8_t> q(q_.size() * bytes);
    for (size_t i = 0; i < q_.size(); ++i) {
      const auto dim = static_cast<int64_t>(i) % heads_.dims;
      const int64_t other = query_dim(distance, dim, heads_.dims) - dim;
      const float x =
          q_[static_cast<size_t>(static_cast<int64_t>(i) + other)] * query_factor(distance);
      const uint16_t bits = heads_.q == DType::f16 ? f32_to_f16(x) : f32_to_bf16(x);
      std::memcpy(q.data() + i * bytes,
                  bytes == 4 ? static_cast<const void*>(&x) : static_cast<const void*>(&bits),
                  bytes);
    }
    return q;
  }
  std::vector<uint8_t> all_unchunked() const {
    std::vector<uint8_t> flags;
    for (const Part& part : parts_) flags.push_back(part.unchunked ? 1 : 0);
    return flags;
  }
  // Those of lists without any are NaN, which nobody asks for.
  std::vector<float> all_weights() const {
    std::vector<float> weights;
    for (const Part& part : parts_) {
      for (size_t list = 0; list < part.words.size(); ++list) {
        const size_t end = weights.size() + static_cast<size_t>(64 * list_words_);
        if (!part.log_weights.empty()) {
          const std::vector<float>& own = part.log_weights[list];
          weights.insert(weights.end(), own.begin(), own.end());
        }
        weights.resize(end, std::nanf(""));
      }
    }
    return weights;
  }
  std::vector<uint8_t> all_weighted() const {
    std::vector<uint8_t> weighted;
    for (const Part& part : parts_) {
      weighted.resize(weighted.size() + part.words.size(), part.log_weights.empty() ? 0 : 1);
    }
    return weighted;
  }
  // One behind the other, and where each begins; -1: it has none.
  std::vector<float> all_planes(std::vector<int64_t>& starts) const {
    std::vector<float> planes;
    for (const Part& part : parts_) {
      starts.push_back(part.plane.empty() ? -1 : static_cast<int64_t>(planes.size()));
      planes.insert(planes.end(), part.plane.begin(), part.plane.end());
    }
    return planes;
  }
  std::vector<uint64_t> all_words() const {
    std::vector<uint64_t> words;
    for (const Part& part : parts_) {
      for (const auto& list : part.words) {
        words.insert(words.end(), list.begin(), list.end());
        words.resize(words.size() + static_cast<size_t>(list_words_) - list.size());
      }
    }
    return words;
  }

  const Cache& cache_;
  const Heads heads_;
  const Rules rules_;
  const std::vector<Part> parts_;
  std::vector<int32_t> qo_indptr_{0}, kv_indptr_{0}, kv_indices_, kv_len_, tree_start_;
  std::vector<int32_t> first_block_;
  std::vector<uint64_t> paths_;
  std::vector<float> q_;
  int32_t num_blocks_ = 0;
  int64_t list_words_ = 0;
};

inline std::vector<float> widened(const std::vector<uint8_t>& bytes, DType dtype) {
  const auto size = static_cast<size_t>(dtype_info(dtype).block_bytes);
  std::vector<float> values(bytes.size() / size);
  for (size_t i = 0; i < values.size(); ++i) {
    uint16_t bits = 0;
    std::memcpy(size == 4 ? static_cast<void*>(&values[i]) : static_cast<void*>(&bits),
                bytes.data() + i * size, size);
    if (size == 2) values[i] = dtype == DType::f16 ? f16_to_f32(bits) : bf16_to_f32(bits);
  }
  return values;
}

// Of rows of an operand, whose padding must be zeros.
inline std::vector<float> rows_of(const std::vector<uint8_t>& bytes, const ops::Operand& operand) {
  const DType dtype = operand.arithmetic == ops::Arithmetic::f32 ? DType::f32 : DType::bf16;
  std::vector<float> values;
  for (int64_t row = 0; row < operand.rows; ++row) {
    const auto first = bytes.begin() + row * operand.row_bytes();
    const int64_t padded = ops::padded_cols(operand.cols) * dtype_info(dtype).block_bytes;
    const std::vector<float> all = widened({first, first + padded}, dtype);
    for (size_t i = static_cast<size_t>(operand.cols); i < all.size(); ++i) CHECK_EQ(all[i], 0.0f);
    values.insert(values.end(), all.begin(), all.begin() + operand.cols);
  }
  return values;
}

inline Results Batch::run(const Launch& how) const {
  ops::AttentionWork work;
  ops::plan_attention(shape(how), host_layout(), work);

  const DeviceArray<int32_t> qo_indptr(qo_indptr_), kv_indptr(kv_indptr_), kv_indices(kv_indices_);
  const DeviceArray<int32_t> kv_len(kv_len_), tree_start(tree_start_), first_block(first_block_);
  const DeviceArray<uint64_t> paths(paths_), words(all_words());
  const DeviceArray<float> slopes(rules_.slopes), sinks(rules_.sinks), weights(all_weights());
  const DeviceArray<uint8_t> weighted(all_weighted());
  std::vector<int64_t> plane_starts;
  const DeviceArray<float> planes(all_planes(plane_starts)), first_logits(rules_.first_logits);
  std::vector<ops::SlotWeights> slot_weights;
  for (size_t i = 0; i < parts_.size(); ++i) {
    const auto slots = static_cast<int64_t>(parts_[i].plane.size()) / heads_.kv_heads;
    slot_weights.push_back(
        {plane_starts[i] < 0 ? nullptr : planes.data() + plane_starts[i], slots});
  }
  const DeviceArray<ops::SlotWeights> slots_there(slot_weights);
  const DeviceArray<uint8_t> q(queries(0)), q_before(queries(1)), q_far(queries(2));
  const DeviceArray<uint8_t> unchunked(all_unchunked());
  const DeviceWork work_there(work, heads_.dims);
  const DeviceArray<uint8_t> out(q.size());
  const DeviceArray<float> lse(static_cast<size_t>(num_rows() * heads_.qo_heads()));

  ops::AttentionProblem p;
  p.q = {q.data(), heads_.q, heads_.dims, int64_t{heads_.qo_heads()} * heads_.dims, heads_.dims};
  p.k = keys_of(cache_.layer());
  p.v = values_of(cache_.layer());
  std::optional<DividedPages> keys, values;
  if (how.far) {
    keys.emplace(cache_.key_bytes(), p.k.page_stride).point(p.k);
    values.emplace(cache_.value_bytes(), p.v.page_stride).point(p.v);
  }
  p.num_qo_heads = heads_.qo_heads();
  p.num_kv_heads = heads_.kv_heads;
  p.batch = host_layout();
  p.batch.qo_indptr = qo_indptr.data();
  p.batch.kv_indptr = kv_indptr.data();
  p.batch.kv_indices = kv_indices.data();
  p.batch.kv_len = kv_len.data();
  p.batch.ancestors = paths.data();
  p.batch.tree_start = tree_start.data();
  p.batch.unchunked = unchunked.data();
  set_rules(p);
  p.chunk = rules_.chunk;
  p.q_before = p.q_far = p.q;
  p.q_before.data = q_before.data();
  p.q_far.data = q_far.data();
  if (!rules_.slopes.empty()) p.alibi_slopes = slopes.data();
  if (!rules_.sinks.empty()) p.sink_logits = sinks.data();
  work_there.point(p);
  p.own_sums = how.own_sums;
  p.visits.num_blocks = num_blocks_;
  p.visits.num_kv_heads = heads_.kv_heads;
  p.visits.list_words = list_words_;
  p.visits.words = words.data();
  p.visits.first_block = first_block.data();
  p.visits.log_weights = weights.data();
  p.visits.weighted = weighted.data();
  p.visits.weighs_blocks =
      std::ranges::any_of(parts_, [](const Part& part) { return !part.log_weights.empty(); });
  if (planes.size() > 0) p.weights = "counts";
  p.weighted = slots_there.data();
  if (!rules_.first_logits.empty()) p.first_logits = first_logits.data();
  p.out = out.data();
  p.out_stride = p.q.row_stride;
  p.lse = lse.data();
  ops::Operand operand;
  DeviceArray<uint8_t> operand_rows;
  if (how.operand) {
    operand = {*how.operand, num_rows(), p.q.row_stride, nullptr};
    operand_rows = DeviceArray<uint8_t>(static_cast<size_t>(num_rows() * operand.row_bytes()));
    operand.data = operand_rows.data();
    p.out_operand = operand;
  }
  run_on_gpu(p);
  work_there.check_counts();
  return {how.operand ? rows_of(operand_rows.values(), operand) : widened(out.values(), heads_.q),
          lse.values()};
}

}  // namespace effinfer
