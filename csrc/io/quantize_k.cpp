// q4_k, q5_k and q6_k. Each sub-block is fitted by itself; the block's scales are then rounded to
// the integers that the format has, each with a look at its neighbours, and what all sub-blocks
// share, d and dmin, is solved for by least squares with these integers, in turn.
#include <cmath>
#include <limits>

#include "io/quantize_blocks.h"
#include "io/quantize_fit.h"

namespace effinfer::gguf {
namespace {

constexpr int kSize = 256;
constexpr int kRounds = 2;  // of solving for d and dmin; later ones gain less than 0.1%

// ---- w = (d * s) * q - dmin * m, sub-blocks of 32 -----------------------------------------------

struct AffineBlock {
  float d = 0;
  float dmin = 0;
  int scales[8];  // 0..63
  int mins[8];
  float error = 0;

  float scale(int j) const { return d * static_cast<float>(scales[j]); }
  float min(int j) const { return dmin * static_cast<float>(mins[j]); }
};

constexpr float kMaxScale = 63.0f;

template <int max>
Lanes affine_quants(Lanes w, float inverse_scale, float min) {
  return limit(nearest((w + min) * inverse_scale), 0.0f, max);
}

template <int max>
float affine_error(const float* w, float scale, float min) {
  const float inv = inverse(scale);
  Lanes error{};
  for (int i = 0; i < 32; i += 4) {
    const Lanes value = load(w + i);
    const Lanes difference = (scale * affine_quants<max>(value, inv, min) - min) - value;
    error += difference * difference;
  }
  return sum(error);
}

// The integers of sub-block j: the best of those within 1 of the given ones.
template <int max>
float choose_affine(const float* w, int j, int scale, int min, AffineBlock& block) {
  float best = std::numeric_limits<float>::infinity();
  block.scales[j] = block.mins[j] = 0;
  for (int s = std::max(scale - 1, 0); s <= std::min(scale + 1, 63); ++s) {
    for (int m = std::max(min - 1, 0); m <= std::min(min + 1, 63); ++m) {
      const float error =
          affine_error<max>(w, block.d * static_cast<float>(s), block.dmin * static_cast<float>(m));
      if (error >= best) continue;
      best = error;
      block.scales[j] = s;
      block.mins[j] = m;
    }
  }
  return best;
}

// d and dmin of least squares for the block's integers; false where they are not determined.
template <int max>
bool solve(const float* w, AffineBlock& block) {
  double aa = 0, ab = 0, bb = 0, aw = 0, bw = 0;
  for (int j = 0; j < 8; ++j) {
    const float inv = inverse(block.scale(j));
    Lanes sum_q{}, sum_qq{}, sum_w{}, sum_wq{};
    for (int i = 32 * j; i < 32 * (j + 1); i += 4) {
      const Lanes value = load(w + i);
      const Lanes q = affine_quants<max>(value, inv, block.min(j));
      sum_q += q;
      sum_qq += q * q;
      sum_w += value;
      sum_wq += value * q;
    }
    const double s = block.scales[j];
    const double m = -block.mins[j];
    aa += s * s * sum(sum_qq);
    ab += s * m * sum(sum_q);
    bb += 32 * m * m;
    aw += s * sum(sum_wq);
    bw += m * sum(sum_w);
  }
  const double determinant = aa * bb - ab * ab;
  double d = 0;
  double dmin = block.dmin;
  if (determinant > 1e-9 * aa * bb) {
    d = (aw * bb - bw * ab) / determinant;
    dmin = (bw * aa - aw * ab) / determinant;
  } else if (aa > 0) {
    d = (aw - dmin * ab) / aa;
  }
  if (!(d > 0) || !(dmin >= 0)) return false;
  block.d = rounded_to_f16(static_cast<float>(d));
  block.dmin = rounded_to_f16(static_cast<float>(dmin));
  return true;
}

template <int max>
AffineBlock fit_affine_block(const float* w) {
  Affine fits[8];
  float largest_scale = 0;
  float largest_min = 0;
  for (int j = 0; j < 8; ++j) {
    fits[j] = fit_affine<32, max, true>(w + 32 * j);
    largest_scale = std::max(largest_scale, fits[j].scale);
    largest_min = std::max(largest_min, -fits[j].offset);
  }
  AffineBlock best;
  best.d = rounded_to_f16(largest_scale / kMaxScale);
  best.dmin = rounded_to_f16(largest_min / kMaxScale);
  const float inv_d = inverse(best.d);
  const float inv_min = inverse(best.dmin);
  for (int j = 0; j < 8; ++j) {
    const auto scale = static_cast<int>(limit(nearest(fits[j].scale * inv_d), 0, kMaxScale));
    const auto min = static_cast<int>(limit(nearest(-fits[j].offset * inv_min), 0, kMaxScale));
    best.error += choose_affine<max>(w + 32 * j, j, scale, min, best);
  }
  for (int round = 0; round < kRounds; ++round) {
    AffineBlock next = best;
    if (!solve<max>(w, next)) break;
    next.error = 0;
    for (int j = 0; j < 8; ++j) {
      next.error += choose_affine<max>(w + 32 * j, j, best.scales[j], best.mins[j], next);
    }
    if (!(next.error < best.error)) break;
    best = next;
  }
  return best;
}

template <int max>
void round_affine(const float* w, const AffineBlock& block, uint8_t* q) {
  for (int j = 0; j < 8; ++j) {
    const float inv = inverse(block.scale(j));
    for (int i = 32 * j; i < 32 * (j + 1); i += 4) {
      const Lanes quants = affine_quants<max>(load(w + i), inv, block.min(j));
      for (int lane = 0; lane < 4; ++lane) q[i + lane] = static_cast<uint8_t>(quants[lane]);
    }
  }
}

ScalesK pack_scales(const AffineBlock& block) {
  ScalesK out{};
  for (int j = 0; j < 4; ++j) {
    const int s = block.scales[j + 4];
    const int m = block.mins[j + 4];
    out.bytes[j] = static_cast<uint8_t>(block.scales[j] | (s >> 4) << 6);
    out.bytes[4 + j] = static_cast<uint8_t>(block.mins[j] | (m >> 4) << 6);
    out.bytes[8 + j] = static_cast<uint8_t>((s & 15) | (m & 15) << 4);
  }
  return out;
}

// ---- w = (d * s) * q, sub-blocks of 16 ----------------------------------------------------------

struct SymmetricBlock {
  float d = 0;
  int scales[16];  // -128..127
  float error = 0;

  float scale(int j) const { return d * static_cast<float>(scales[j]); }
};

Lanes symmetric_quants(Lanes w, float inverse_scale) {
  return limit(nearest(w * inverse_scale), -32.0f, 31.0f);
}

float symmetric_error(const float* w, float scale) {
  const float inv = inverse(scale);
  Lanes error{};
  for (int i = 0; i < 16; i += 4) {
    const Lanes value = load(w + i);
    const Lanes difference = scale * symmetric_quants(value, inv) - value;
    error += difference * difference;
  }
  return sum(error);
}

float choose_symmetric(const float* w, int j, int scale, SymmetricBlock& block) {
  float best = std::numeric_limits<float>::infinity();
  block.scales[j] = 0;
  for (int s = std::max(scale - 1, -128); s <= std::min(scale + 1, 127); ++s) {
    const float error = symmetric_error(w, block.d * static_cast<float>(s));
    if (error >= best) continue;
    best = error;
    block.scales[j] = s;
  }
  return best;
}

bool solve(const float* w, SymmetricBlock& block) {
  double aa = 0;
  double aw = 0;
  for (int j = 0; j < 16; ++j) {
    const float inv = inverse(block.scale(j));
    Lanes sum_qq{};
    Lanes sum_wq{};
    for (int i = 16 * j; i < 16 * (j + 1); i += 4) {
      const Lanes value = load(w + i);
      const Lanes q = symmetric_quants(value, inv);
      sum_qq += q * q;
      sum_wq += value * q;
    }
    const double s = block.scales[j];
    aa += s * s * sum(sum_qq);
    aw += s * sum(sum_wq);
  }
  if (!(aa > 0) || !(aw > 0)) return false;
  block.d = rounded_to_f16(static_cast<float>(aw / aa));
  return true;
}

SymmetricBlock fit_symmetric_block(const float* w) {
  float fits[16];
  float largest = 0;
  for (int j = 0; j < 16; ++j) {
    fits[j] = fit_symmetric<16, 32>(w + 16 * j);
    largest = std::max(largest, std::abs(fits[j]));
  }
  SymmetricBlock best;
  best.d = rounded_to_f16(largest / 127.0f);
  const float inv = inverse(best.d);
  for (int j = 0; j < 16; ++j) {
    const auto scale = static_cast<int>(limit(nearest(fits[j] * inv), -128.0f, 127.0f));
    best.error += choose_symmetric(w + 16 * j, j, scale, best);
  }
  for (int round = 0; round < kRounds; ++round) {
    SymmetricBlock next = best;
    if (!solve(w, next)) break;
    next.error = 0;
    for (int j = 0; j < 16; ++j) {
      next.error += choose_symmetric(w + 16 * j, j, best.scales[j], next);
    }
    if (!(next.error < best.error)) break;
    best = next;
  }
  return best;
}

}  // namespace

void encode_block(const float* w, BlockQ4K& block) {
  const AffineBlock fit = fit_affine_block<15>(w);
  uint8_t q[kSize];
  round_affine<15>(w, fit, q);
  block.d = half_of(fit.d);
  block.dmin = half_of(fit.dmin);
  block.scales = pack_scales(fit);
  for (int c = 0; c < 4; ++c) pack_nibbles<32>(q + 64 * c, block.qs + 32 * c);
}

void encode_block(const float* w, BlockQ5K& block) {
  const AffineBlock fit = fit_affine_block<31>(w);
  uint8_t q[kSize];
  round_affine<31>(w, fit, q);
  block.d = half_of(fit.d);
  block.dmin = half_of(fit.dmin);
  block.scales = pack_scales(fit);
  for (int c = 0; c < 4; ++c) pack_nibbles<32>(q + 64 * c, block.qs + 32 * c);
  pack_bit_planes(q, 4, block.qh);
}

void encode_block(const float* w, BlockQ6K& block) {
  const SymmetricBlock fit = fit_symmetric_block(w);
  block.d = half_of(fit.d);
  uint8_t q[kSize];
  for (int j = 0; j < 16; ++j) {
    block.scales[j] = static_cast<int8_t>(fit.scales[j]);
    const float inv_scale = inverse(fit.scale(j));
    for (int i = 16 * j; i < 16 * (j + 1); i += 4) {
      const Lanes quants = symmetric_quants(load(w + i), inv_scale) + 32.0f;
      for (int lane = 0; lane < 4; ++lane) q[i + lane] = static_cast<uint8_t>(quants[lane]);
    }
  }
  for (int c = 0; c < 2; ++c) {
    pack_nibbles<64>(q + 128 * c, block.ql + 64 * c);
    uint8_t high[128];
    for (int i = 0; i < 128; ++i) high[i] = q[128 * c + i] >> 4;
    pack_pairs(high, block.qh + 32 * c);
  }
}

}  // namespace effinfer::gguf
