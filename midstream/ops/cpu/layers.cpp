// Row operations of the decoder. A row's bits depend on that row alone: threads share rows out, never a row.

#include "rope.h"

namespace {

// sum = x + y (x alone where y is null), rounded to T; out = sum / rms(sum) * weight. Rows of D elements, D % 16 == 0.
template <typename T>
void add_rms_norm(T* out, T* sum, const T* x, const T* y, const T* weight, int64_t rows, int D, float eps,
                  int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1 && rows * D >= GRAIN)
  for (int64_t r = 0; r < rows; ++r) {
    const T* from = x + r * D;
    vec squares = vec{};
    if (y) {
      for (int d = 0; d < D; d += L) store(sum + r * D + d, load(from + d) + load(y + r * D + d));
      from = sum + r * D;
    }
    for (int d = 0; d < D; d += L) { vec v = load(from + d); squares += v * v; }
    const float scale = 1.0f / std::sqrt(sum_lanes(squares) / D + eps);
    for (int d = 0; d < D; d += L) store(out + r * D + d, load(from + d) * scale * load(weight + d));
  }
}

// gate | up [2N] -> silu(gate) * up [N], N % 16 == 0.
template <typename T>
void silu_and_mul(T* out, const T* x, int64_t rows, int N, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1 && rows * N >= GRAIN)
  for (int64_t r = 0; r < rows; ++r) {
    const T* gate = x + r * 2 * N;
    for (int i = 0; i < N; i += L) {
      vec g = load(gate + i);
      vec e = exp_as<T>(g < 0.0f ? g : -g);
      vec sigmoid = (g < 0.0f ? e : splat(1.0f)) / (e + 1.0f);
      store(out + r * N + i, g * sigmoid * load(gate + N + i));
    }
  }
}

// Gradients of the above from that of its output: dx [rows, 2N].
template <typename T>
void silu_and_mul_backward(T* dx, const T* dout, const T* x, int64_t rows, int N, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1 && rows * N >= GRAIN)
  for (int64_t r = 0; r < rows; ++r) {
    const T* gate = x + r * 2 * N;
    for (int i = 0; i < N; i += L) {
      vec g = load(gate + i), grad = load(dout + r * N + i);
      vec e = exp_neg(g < 0.0f ? g : -g);
      vec sigmoid = (g < 0.0f ? e : splat(1.0f)) / (e + 1.0f);
      store(dx + r * 2 * N + i, grad * load(gate + N + i) * sigmoid * (1.0f + g * (1.0f - sigmoid)));
      store(dx + r * 2 * N + N + i, grad * g * sigmoid);
    }
  }
}

// Gradient of split_rope without norms: dqkv from dq, dk, dv.
template <typename T>
void split_rope_backward(T* dqkv, const T* dq, const T* dk, const T* dv, const int64_t* positions, const float* cos,
                         const float* sin, int64_t rows, int H, int K, int F, int threads) {
  const int64_t width = int64_t(H + 2 * K) * F;
  const T* none = nullptr;
#pragma omp parallel for num_threads(threads) if (threads > 1 && rows * width >= GRAIN)
  for (int64_t r = 0; r < rows; ++r) {
    float scratch[512];
    const float *c = cos + positions[r] * (F / 2), *s = sin + positions[r] * (F / 2);
    T* to = dqkv + r * width;
    for (int h = 0; h < H; ++h, to += F) rotate(to, dq + (r * H + h) * F, c, s, none, 0.0f, -1.0f, F, scratch);
    for (int h = 0; h < K; ++h, to += F) rotate(to, dk + (r * K + h) * F, c, s, none, 0.0f, -1.0f, F, scratch);
    std::memcpy(to, dv + r * K * F, size_t(K) * F * sizeof(T));
  }
}

}  // namespace

#define EXPORT(SUFFIX, T)                                                                                            \
  extern "C" void midstream_add_rms_norm_##SUFFIX(T* out, T* sum, const T* x, const T* y, const T* weight,           \
                                                  int64_t rows, int D, float eps, int threads) {                     \
    add_rms_norm<T>(out, sum, x, y, weight, rows, D, eps, threads);                                                  \
  }                                                                                                                  \
  extern "C" void midstream_silu_and_mul_##SUFFIX(T* out, const T* x, int64_t rows, int N, int threads) {            \
    silu_and_mul<T>(out, x, rows, N, threads);                                                                       \
  }                                                                                                                  \
  extern "C" void midstream_silu_and_mul_backward_##SUFFIX(T* dx, const T* dout, const T* x, int64_t rows, int N,    \
                                                           int threads) {                                            \
    silu_and_mul_backward<T>(dx, dout, x, rows, N, threads);                                                         \
  }                                                                                                                  \
  extern "C" void midstream_split_rope_##SUFFIX(T* q, T* k, T* v, const T* qkv, const int64_t* positions,            \
                                                const float* cos, const float* sin, const T* q_norm,                 \
                                                const T* k_norm, int64_t rows, int H, int K, int F, float eps,       \
                                                int threads) {                                                       \
    split_rope<T>(q, k, v, qkv, positions, cos, sin, q_norm, k_norm, rows, H, K, F, eps, threads);                   \
  }                                                                                                                  \
  extern "C" void midstream_split_rope_backward_##SUFFIX(T* dqkv, const T* dq, const T* dk, const T* dv,             \
                                                         const int64_t* positions, const float* cos,                 \
                                                         const float* sin, int64_t rows, int H, int K, int F,        \
                                                         int threads) {                                              \
    split_rope_backward<T>(dqkv, dq, dk, dv, positions, cos, sin, rows, H, K, F, threads);                           \
  }

EXPORT(f32, float)
EXPORT(bf16, bf16)
