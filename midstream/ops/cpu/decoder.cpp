// All layers of a decoder in one call: the kernels of the other files, one after another, with nothing between them.

#include "lanes.h"

#define DECLARE(SUFFIX, T)                                                                                           \
  extern "C" {                                                                                                       \
  void midstream_add_rms_norm_##SUFFIX(T*, T*, const T*, const T*, const T*, int64_t, int, float, int);              \
  void midstream_silu_and_mul_##SUFFIX(T*, const T*, int64_t, int, int);                                             \
  void midstream_linear_##SUFFIX(T*, const T*, const T*, int64_t, int64_t, int, int);                                \
  void midstream_rope_attention_##SUFFIX(T*, T*, T*, T*, const T*, const int64_t*, const float*, const float*,       \
                                         const T*, const T*, const int64_t*, const int32_t*, const int32_t*,         \
                                         const int32_t*, int64_t, int, int, int, int, int, int, float, float, int);  \
  }                                                                                                                  \
  namespace {                                                                                                        \
  template <> struct Kernels<T> {                                                                                    \
    static constexpr auto norm = midstream_add_rms_norm_##SUFFIX;                                                    \
    static constexpr auto silu = midstream_silu_and_mul_##SUFFIX;                                                    \
    static constexpr auto linear = midstream_linear_##SUFFIX;                                                        \
    static constexpr auto attend = midstream_rope_attention_##SUFFIX;                                                \
  };                                                                                                                 \
  }

namespace { template <typename T> struct Kernels; }
DECLARE(f32, float)
DECLARE(bf16, bf16)

namespace {

template <typename T>
struct Layer {  // ``Layer`` of __init__.py; null where the architecture has none
  const T *input_norm, *qkv, *qkv_bias, *q_norm, *k_norm, *o, *o_bias, *post_norm, *gate_up, *down;
};

template <typename T>
void add_bias(T* x, const T* bias, int64_t rows, int64_t width) {
  for (int64_t r = 0; bias && r < rows; ++r)
    for (int64_t i = 0; i < width; i += L) store(x + r * width + i, load(x + r * width + i) + load(bias + i));
}

// x [rows, D], which is overwritten -> out [rows, D]; keys and values: one cache of ``cache`` elements for each layer.
template <typename T>
void decode(T* out, T* x, T* scratch, const Layer<T>* layers, int num_layers, const T* norm, T* keys, T* values,
            int64_t cache, const int64_t* positions, const float* cos, const float* sin, const int64_t* slots,
            const int32_t* tables, const int32_t* cu_q, const int32_t* seq_lens, int64_t rows, int R, int stride, int D,
            int I, int H, int K, int F, int S, float scale, float eps, int threads) {
  typedef Kernels<T> k;
  const int64_t width = int64_t(H + 2 * K) * F;
  T *h = out, *y = scratch, *wide = y + rows * D, *narrow = wide + rows * (width > 2 * I ? width : 2 * I),
    *split = narrow + rows * (H * F > I ? H * F : I);
  for (int l = 0; l < num_layers; ++l) {
    const Layer<T>& of = layers[l];
    k::norm(h, x, x, l ? y : nullptr, of.input_norm, rows, D, eps, threads);
    k::linear(wide, h, of.qkv, rows, width, D, threads);
    add_bias(wide, of.qkv_bias, rows, width);
    k::attend(narrow, split, keys + l * cache, values + l * cache, wide, positions, cos, sin, of.q_norm, of.k_norm,
              slots, tables, cu_q, seq_lens, rows, R, stride, H, K, F, S, scale, eps, threads);
    k::linear(y, narrow, of.o, rows, D, H * F, threads);
    add_bias(y, of.o_bias, rows, D);
    k::norm(h, x, x, y, of.post_norm, rows, D, eps, threads);
    k::linear(wide, h, of.gate_up, rows, 2 * I, D, threads);
    k::silu(narrow, wide, rows, I, threads);
    k::linear(y, narrow, of.down, rows, D, I, threads);
  }
  k::norm(out, x, x, y, norm, rows, D, eps, threads);
}

}  // namespace

#define EXPORT(SUFFIX, T)                                                                                            \
  extern "C" void midstream_decode_##SUFFIX(                                                                         \
      T* out, T* x, T* scratch, const void* layers, const T* norm, T* keys, T* values, const int64_t* positions,     \
      const float* cos, const float* sin, const int64_t* slots, const int32_t* tables, const int32_t* cu_q,          \
      const int32_t* seq_lens, int64_t cache, int64_t rows, int num_layers, int R, int stride, int D, int I, int H,  \
      int K, int F, int S, float scale, float eps, int threads) {                                                    \
    decode<T>(out, x, scratch, static_cast<const Layer<T>*>(layers), num_layers, norm, keys, values, cache,          \
              positions, cos, sin, slots, tables, cu_q, seq_lens, rows, R, stride, D, I, H, K, F, S, scale, eps,     \
              threads);                                                                                              \
  }

EXPORT(f32, float)
EXPORT(bf16, bf16)
