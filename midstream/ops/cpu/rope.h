// From the fused product of a layer to its queries, keys and values.

#pragma once

#include "lanes.h"

namespace {

// One head [F]: normalised where there is a weight, then rotated by cos, sin [F / 2] (times sign: -1 rotates back).
template <typename T>
inline void rotate(T* out, const T* x, const float* cos, const float* sin, const T* weight, float eps, float sign,
                   int F, float* scratch) {
  float scale = 1.0f;
  if (weight) {
    vec squares = vec{};
    for (int f = 0; f < F; f += L) { vec v = load(x + f); squares += v * v; }
    scale = 1.0f / std::sqrt(sum_lanes(squares) / F + eps);
  }
  for (int f = 0; f < F; f += L) {
    vec v = load(x + f);
    if (weight) v = v * scale * load(weight + f);
    store(scratch + f, v);
  }
  const int half = F / 2;
  for (int f = 0; f < half; f += L) {
    vec a = load(scratch + f), b = load(scratch + half + f), c = load(cos + f), s = load(sin + f) * sign;
    store(out + f, a * c - b * s);
    store(out + half + f, b * c + a * s);
  }
}

// qkv [T, (H + 2K) F] -> q [T, H, F], k [T, K, F] (norms where given, then rope) and v [T, K, F]; cos, sin
// [positions, F / 2]; F % 32 == 0, F <= 512.
template <typename T>
__attribute__((noinline)) void split_rope(T* q, T* k, T* v, const T* qkv, const int64_t* positions, const float* cos,
                                          const float* sin, const T* q_norm, const T* k_norm, int64_t rows, int H,
                                          int K, int F, float eps, int threads) {
  const int64_t width = int64_t(H + 2 * K) * F;
#pragma omp parallel for num_threads(threads) if (threads > 1 && rows * width >= GRAIN)
  for (int64_t r = 0; r < rows; ++r) {
    float scratch[512];
    const float *c = cos + positions[r] * (F / 2), *s = sin + positions[r] * (F / 2);
    const T* from = qkv + r * width;
    for (int h = 0; h < H; ++h, from += F) rotate(q + (r * H + h) * F, from, c, s, q_norm, eps, 1.0f, F, scratch);
    for (int h = 0; h < K; ++h, from += F) rotate(k + (r * K + h) * F, from, c, s, k_norm, eps, 1.0f, F, scratch);
    std::memcpy(v + r * K * F, from, size_t(K) * F * sizeof(T));
  }
}

}  // namespace
