// Sixteen lanes of fp32, loaded from and stored to fp32 or bf16: the alphabet of all kernels here. GCC and clang make
// AVX-512, AVX2 or NEON code of it; only what has no such expression names an instruction set, beside a plain path.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#ifdef __AVX512F__
#include <immintrin.h>
#endif

namespace {

constexpr int L = 16;
constexpr int64_t GRAIN = 1 << 15;  // elements that are worth a second thread
typedef float vec __attribute__((vector_size(L * 4), aligned(4)));
typedef int32_t ivec __attribute__((vector_size(L * 4), aligned(4)));
typedef uint32_t uvec __attribute__((vector_size(L * 4), aligned(4)));
typedef uint16_t hvec __attribute__((vector_size(L * 2), aligned(2)));

struct bf16 { uint16_t bits; };

inline vec load(const float* p) { vec v; std::memcpy(&v, p, sizeof v); return v; }
inline vec load(const bf16* p) {
  hvec h; std::memcpy(&h, p, sizeof h);
  uvec u = __builtin_convertvector(h, uvec) << 16;
  vec v; std::memcpy(&v, &u, sizeof v); return v;
}
inline float scalar(float x) { return x; }
inline float scalar(bf16 x) { uint32_t u = uint32_t(x.bits) << 16; float f; std::memcpy(&f, &u, 4); return f; }
inline void store(float* p, vec v) { std::memcpy(p, &v, sizeof v); }
inline void store(bf16* p, vec v) {  // round to nearest even; NaN stays NaN
#ifdef __AVX512BF16__
  __m256bh h = _mm512_cvtneps_pbh((__m512)v);
  std::memcpy(p, &h, sizeof h);
#else
  uvec u; std::memcpy(&u, &v, sizeof u);
  uvec r = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  ivec nan = (v != v);
  r = (uvec)(((ivec)r & ~nan) | (nan & 0x7fc0));
  hvec h = __builtin_convertvector(r, hvec);
  std::memcpy(p, &h, sizeof h);
#endif
}
inline vec splat(float x) { return x - vec{}; }

// Lanes are added in order, so a sum over whole vectors has one value whatever the compiler does.
inline float sum_lanes(vec v) {
  float s = 0;
  for (int i = 0; i < L; ++i) s += v[i];
  return s;
}
inline float max_lanes(vec v) {
  float m = v[0];
  for (int i = 1; i < L; ++i) m = v[i] > m ? v[i] : m;
  return m;
}
inline vec larger(vec a, vec b) {  // b where either is NaN
#ifdef __AVX512F__
  return (vec)_mm512_max_ps((__m512)a, (__m512)b);
#else
  return a > b ? a : b;
#endif
}
inline bool any(ivec v) {
#ifdef __AVX512F__
  return _mm512_test_epi32_mask((__m512i)v, (__m512i)v);
#else
  int32_t bits = 0;
  for (int i = 0; i < L; ++i) bits |= v[i];
  return bits;
#endif
}

// exp(x) for x <= 0: round to a power of two, then a degree-6 polynomial on [-ln2/2, ln2/2]; -inf gives exactly 0.
inline vec exp_neg(vec x) {
  const vec low = splat(-87.0f);
#ifdef __AVX512F__
  const __mmask16 live = _mm512_cmp_ps_mask((__m512)x, (__m512)low, _CMP_NLT_UQ);
  const vec n = (vec)_mm512_roundscale_ps((__m512)(x * 1.44269504088896341f), _MM_FROUND_TO_NEAREST_INT);
#else
  const ivec dead = x < low;
  x = x < low ? low : x;
  const vec magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const vec n = (x * 1.44269504088896341f + magic) - magic;
#endif
  vec r = x - n * 0.693145751953125f;
  r = r - n * 1.42860682030941723212e-6f;
  vec p = splat(1.3888889e-3f);
  p = p * r + 8.3333338e-3f;
  p = p * r + 4.1666668e-2f;
  p = p * r + 1.6666667e-1f;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
#ifdef __AVX512F__
  return (vec)_mm512_maskz_scalef_ps(live, (__m512)p, (__m512)n);
#else
  ivec e = (__builtin_convertvector(n, ivec) + 127) << 23;
  vec scale; std::memcpy(&scale, &e, sizeof scale);
  p = p * scale;
  ivec bits; std::memcpy(&bits, &p, sizeof bits);
  bits &= ~dead;
  std::memcpy(&p, &bits, sizeof p);
  return p;
#endif
}

// exp of something <= 0 that will be rounded to T: for bf16 half the operations give all its bits, and more.
template <typename T> inline vec exp_as(vec x) { return exp_neg(x); }
#ifdef __AVX512F__
template <> inline vec exp_as<bf16>(vec x) {
  const vec low = splat(-87.0f);
  const __mmask16 live = _mm512_cmp_ps_mask((__m512)x, (__m512)low, _CMP_GE_OQ);
  vec t = x * 1.44269504088896341f;
  vec n = (vec)_mm512_roundscale_ps((__m512)t, _MM_FROUND_TO_NEAREST_INT);
  vec r = t - n;  // 2^r on [-1/2, 1/2], relative error 3e-6
  vec p = splat(9.5605200e-3f);
  p = p * r + 5.5917120e-2f;
  p = p * r + 2.4024982e-1f;
  p = p * r + 6.9312196e-1f;
  p = p * r + 9.9999919e-1f;
  return (vec)_mm512_maskz_scalef_ps(live, (__m512)p, (__m512)n);
}
#endif

// Products of neighbours: P of them, times as many lanes, go into one sum at a time. That is what bf16 has an instruction
// for. sum[i] += a[Pi] b[Pi] + ... + a[Pi + P - 1] b[Pi + P - 1], in this order.
template <typename T> struct Pair;
template <> struct Pair<float> {
  static constexpr int P = 1;
  typedef vec wide;  // L lanes of P neighbours
  static wide get(const float* p) { return load(p); }
  static wide spread(const float* p) { return splat(*p); }  // the same P neighbours in every lane
  static void add(vec& sum, wide a, wide b) { sum += a * b; }
};
template <> struct Pair<bf16> {
  static constexpr int P = 2;
#ifdef __AVX512BF16__
  typedef __m512i wide;
  static wide get(const bf16* p) { return _mm512_loadu_si512(p); }
  static wide spread(const bf16* p) { int32_t both; std::memcpy(&both, p, 4); return _mm512_set1_epi32(both); }
  static void add(vec& sum, wide a, wide b) {  // sum[i] += a[2i] b[2i] + a[2i + 1] b[2i + 1]
    sum = (vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
  }
#else
  typedef uvec wide;
  static wide get(const bf16* p) { wide w; std::memcpy(&w, p, sizeof w); return w; }
  static wide spread(const bf16* p) { uint32_t both; std::memcpy(&both, p, 4); return both - wide{}; }
  static vec low(wide a) { a <<= 16; vec v; std::memcpy(&v, &a, sizeof v); return v; }
  static vec high(wide a) { a &= 0xffff0000u; vec v; std::memcpy(&v, &a, sizeof v); return v; }
  static void add(vec& sum, wide a, wide b) {
    sum += low(a) * low(b);
    sum += high(a) * high(b);
  }
#endif
};

}  // namespace
