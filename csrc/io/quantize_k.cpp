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
  uint8_t q[kSize];
  float error = 0;
};

constexpr float kMaxScale = 63.0f;

// The quants of a sub-block for a scale and a minimum; returns the squared error.
template <int max>
float round_affine(const float* w, float scale, float min, uint8_t* q) {
  const float inv = inverse(scale);
  float error = 0;
  for (int i = 0; i < 32; ++i) {
    const float value = limit(nearest((w[i] + min) * inv), 0.0f, max);
    const float difference = (scale * value - min) - w[i];
    error += difference * difference;
    q[i] = static_cast<uint8_t>(value);
  }
  return error;
}

// The integers of sub-block j: the best of those within 1 of the given ones.
template <int max>
float choose_affine(const float* w, int j, int scale, int min, AffineBlock& block) {
  float best = std::numeric_limits<float>::infinity();
  block.scales[j] = block.mins[j] = 0;
  uint8_t q[32];
  for (int s = std::max(scale - 1, 0); s <= std::min(scale + 1, 63); ++s) {
    for (int m = std::max(min - 1, 0); m <= std::min(min + 1, 63); ++m) {
      const float error = round_affine<max>(w, block.d * static_cast<float>(s),
                                            block.dmin * static_cast<float>(m), q);
      if (error >= best) continue;
      best = error;
      block.scales[j] = s;
      block.mins[j] = m;
      std::memcpy(block.q + 32 * j, q, sizeof q);
    }
  }
  return best;
}

// d and dmin of least squares for the block's integers; false where they are not determined.
bool solve(const float* w, AffineBlock& block) {
  double aa = 0, ab = 0, bb = 0, aw = 0, bw = 0;
  for (int j = 0; j < 8; ++j) {
    float sum_q = 0, sum_qq = 0, sum_w = 0, sum_wq = 0;
    for (int i = 32 * j; i < 32 * (j + 1); ++i) {
      const float q = block.q[i];
      sum_q += q;
      sum_qq += q * q;
      sum_w += w[i];
      sum_wq += w[i] * q;
    }
    const double s = block.scales[j];
    const double m = -block.mins[j];
    aa += s * s * sum_qq;
    ab += s * m * sum_q;
    bb += 32 * m * m;
    aw += s * sum_wq;
    bw += m * sum_w;
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
    if (!solve(w, next)) break;
    next.error = 0;
    for (int j = 0; j < 8; ++j) {
      next.error += choose_affine<max>(w + 32 * j, j, best.scales[j], best.mins[j], next);
    }
    if (!(next.error < best.error)) break;
    best = next;
  }
  return best;
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
  int scales[16];   // -128..127
  int8_t q[kSize];  // -32..31
  float error = 0;
};

float round_symmetric(const float* w, float scale, int8_t* q) {
  const float inv = inverse(scale);
  float error = 0;
  for (int i = 0; i < 16; ++i) {
    const float value = limit(nearest(w[i] * inv), -32.0f, 31.0f);
    const float difference = scale * value - w[i];
    error += difference * difference;
    q[i] = static_cast<int8_t>(value);
  }
  return error;
}

float choose_symmetric(const float* w, int j, int scale, SymmetricBlock& block) {
  float best = std::numeric_limits<float>::infinity();
  block.scales[j] = 0;
  int8_t q[16];
  for (int s = std::max(scale - 1, -128); s <= std::min(scale + 1, 127); ++s) {
    const float error = round_symmetric(w, block.d * static_cast<float>(s), q);
    if (error >= best) continue;
    best = error;
    block.scales[j] = s;
    std::memcpy(block.q + 16 * j, q, sizeof q);
  }
  return best;
}

bool solve(const float* w, SymmetricBlock& block) {
  double aa = 0;
  double aw = 0;
  for (int j = 0; j < 16; ++j) {
    float sum_qq = 0;
    float sum_wq = 0;
    for (int i = 16 * j; i < 16 * (j + 1); ++i) {
      const float q = block.q[i];
      sum_qq += q * q;
      sum_wq += w[i] * q;
    }
    const double s = block.scales[j];
    aa += s * s * sum_qq;
    aw += s * sum_wq;
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
  block.d = half_of(fit.d);
  block.dmin = half_of(fit.dmin);
  block.scales = pack_scales(fit);
  for (int c = 0; c < 4; ++c) pack_nibbles<32>(fit.q + 64 * c, block.qs + 32 * c);
}

void encode_block(const float* w, BlockQ5K& block) {
  const AffineBlock fit = fit_affine_block<31>(w);
  block.d = half_of(fit.d);
  block.dmin = half_of(fit.dmin);
  block.scales = pack_scales(fit);
  for (int c = 0; c < 4; ++c) pack_nibbles<32>(fit.q + 64 * c, block.qs + 32 * c);
  pack_bit_planes(fit.q, 4, block.qh);
}

void encode_block(const float* w, BlockQ6K& block) {
  const SymmetricBlock fit = fit_symmetric_block(w);
  block.d = half_of(fit.d);
  uint8_t q[kSize];
  for (int i = 0; i < kSize; ++i) q[i] = static_cast<uint8_t>(fit.q[i] + 32);
  for (int j = 0; j < 16; ++j) block.scales[j] = static_cast<int8_t>(fit.scales[j]);
  for (int c = 0; c < 2; ++c) {
    pack_nibbles<64>(q + 128 * c, block.ql + 64 * c);
    uint8_t high[128];
    for (int i = 0; i < 128; ++i) high[i] = q[128 * c + i] >> 4;
    pack_pairs(high, block.qh + 32 * c);
  }
}

}  // namespace effinfer::gguf
