// The engine's CPU kernels: plain C functions over raw pointers, called through ctypes (see __init__.py).
//
// One rule makes them exact: the work for one query token and one kv head is a fixed sequence of operations that
// depends on that token's own context only. Tokens of the context sit in vector lanes, blocks are visited in order,
// masked lanes are computed and then replaced, so there is no remainder loop and no batch-dependent path.
//
// Layouts (B blocks, K kv heads, F head dim, S block size, T tokens, H query heads, G = H / K):
//   q, out [T, H, F]     key cache [B, K, F, S] (tokens in lanes)     value cache [B, K, S, F]

#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

namespace {

constexpr int L = 16;  // lanes; S and F are multiples of it
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
inline void store(bf16* p, vec v) {  // round to nearest even; the values here are finite or NaN from the input
  uvec u; std::memcpy(&u, &v, sizeof u);
  uvec r = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  ivec nan = (v != v);
  r = (uvec)(((ivec)r & ~nan) | (nan & 0x7fc0));
  hvec h = __builtin_convertvector(r, hvec);
  std::memcpy(p, &h, sizeof h);
}
inline vec splat(float x) { return x - vec{}; }

// exp(x) for x <= 0: round to a power of two, then a degree-6 polynomial on [-ln2/2, ln2/2]; -inf gives exactly 0.
inline vec exp_neg(vec x) {
  const vec low = splat(-87.0f);
  ivec dead = x < low;
  x = x < low ? low : x;
  vec t = x * 1.44269504088896341f;
  const vec magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  vec n = (t + magic) - magic;
  vec r = x - n * 0.693145751953125f;
  r = r - n * 1.42860682030941723212e-6f;
  vec p = splat(1.3888889e-3f);
  p = p * r + 8.3333338e-3f;
  p = p * r + 4.1666668e-2f;
  p = p * r + 1.6666667e-1f;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  ivec e = (__builtin_convertvector(n, ivec) + 127) << 23;
  vec scale; std::memcpy(&scale, &e, sizeof scale);
  p = p * scale;
  ivec bits; std::memcpy(&bits, &p, sizeof bits);
  bits &= ~dead;
  std::memcpy(&p, &bits, sizeof p);
  return p;
}

// One query token, one kv head, its G query heads. scores is scratch of G * blocks * S floats.
template <typename T, int G>
void attend(T* out, const T* q, const T* kcache, const T* vcache, const int32_t* table, int valid, int K, int head,
            int F, int S, float scale, float* scores, float* qf) {
  const int blocks = (valid + S - 1) / S, span = blocks * S;
  for (int g = 0; g < G; ++g)
    for (int f = 0; f < F; ++f) qf[g * F + f] = scalar(q[g * F + f]) * scale;
  vec best[G];
  for (int g = 0; g < G; ++g) best[g] = splat(-INFINITY);
  vec lane; for (int i = 0; i < L; ++i) lane[i] = float(i);
  for (int b = 0; b < blocks; ++b) {
    const T* k = kcache + (int64_t(table[b]) * K + head) * F * S;
    for (int s = 0; s < S; s += L) {
      vec sum[G];
      for (int g = 0; g < G; ++g) sum[g] = vec{};
      for (int f = 0; f < F; ++f) {
        vec kv = load(k + f * S + s);
        for (int g = 0; g < G; ++g) sum[g] += kv * qf[g * F + f];
      }
      ivec live = lane < splat(float(valid - b * S - s));
      for (int g = 0; g < G; ++g) {
        vec x = live ? sum[g] : splat(-INFINITY);
        best[g] = best[g] > x ? best[g] : x;
        store(scores + g * span + b * S + s, x);
      }
    }
  }
  float total[G];
  for (int g = 0; g < G; ++g) {
    float m = best[g][0];
    for (int i = 1; i < L; ++i) m = best[g][i] > m ? best[g][i] : m;
    vec sum = vec{};
    for (int i = 0; i < span; i += L) {
      vec p = exp_neg(load(scores + g * span + i) - m);
      sum += p;
      store(scores + g * span + i, p);
    }
    total[g] = 0;
    for (int i = 0; i < L; ++i) total[g] += sum[i];
  }
  for (int f = 0; f < F; f += L) {
    vec a[G];
    for (int g = 0; g < G; ++g) a[g] = vec{};
    for (int b = 0; b < blocks; ++b) {
      const T* v = vcache + (int64_t(table[b]) * K + head) * S * F + f;
      const int n = valid - b * S < S ? valid - b * S : S;  // never reads a slot that was not written
      for (int t = 0; t < n; ++t) {
        vec x = load(v + t * F);
        for (int g = 0; g < G; ++g) a[g] += x * scores[g * span + b * S + t];
      }
    }
    for (int g = 0; g < G; ++g) store(out + g * F + f, a[g] / total[g]);
  }
}

template <typename T>
void attend_group(int G, T* out, const T* q, const T* k, const T* v, const int32_t* table, int valid, int K, int head,
                  int F, int S, float scale, float* scores, float* qf) {
  // Heads are taken up to eight at a time; a head's result does not depend on its neighbours.
  while (G > 0) {
    int n = G > 8 ? 8 : G;
    switch (n) {
#define CASE(N) case N: attend<T, N>(out, q, k, v, table, valid, K, head, F, S, scale, scores, qf); break;
      CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8)
#undef CASE
    }
    out += n * F; q += n * F; G -= n;
  }
}

template <typename T>
void paged_attention(T* out, const T* q, const T* k, const T* v, const int32_t* tables, const int32_t* cu_q,
                     const int32_t* seq_lens, int R, int table_stride, int H, int K, int F, int S, float scale,
                     int threads) {
  const int G = H / K;
  struct Job { int32_t token, request, valid; };
  std::vector<Job> jobs;
  jobs.reserve(cu_q[R]);
  int longest = 0;
  for (int r = 0; r < R; ++r) {
    const int n = cu_q[r + 1] - cu_q[r];
    for (int i = 0; i < n; ++i) jobs.push_back({cu_q[r] + i, r, seq_lens[r] - n + i + 1});
    if (n && seq_lens[r] > longest) longest = seq_lens[r];
  }
  const int64_t count = int64_t(jobs.size()) * K;
  const int64_t scratch = int64_t(8) * ((longest + S - 1) / S) * S + 8 * F;
#pragma omp parallel num_threads(threads) if (threads > 1 && count > 1)
  {
    std::vector<float> buffer(scratch);
    float* scores = buffer.data();
    float* qf = scores + (scratch - 8 * F);
#pragma omp for schedule(dynamic, 4)
    for (int64_t i = 0; i < count; ++i) {
      const Job& job = jobs[i / K];
      const int head = int(i % K);
      const int64_t row = (int64_t(job.token) * H + head * G) * F;
      attend_group<T>(G, out + row, q + row, k, v, tables + int64_t(job.request) * table_stride, job.valid, K, head, F,
                      S, scale, scores, qf);
    }
  }
}

inline float sum_lanes(vec v) {
  float s = 0;
  for (int i = 0; i < L; ++i) s += v[i];
  return s;
}

// Gradients of one query token and one query head: recomputes the probabilities, then adds to dk, dv and sets dq.
// p and ds are scratch of blocks * S floats, lanes of F vectors.
template <typename T>
void attend_backward(float* dq, float* dk, float* dv, const T* dout, const T* q, const T* kcache, const T* vcache,
                     const int32_t* table, int valid, int K, int head, int F, int S, float scale, float* p, float* ds,
                     vec* lanes) {
  const int blocks = (valid + S - 1) / S, span = blocks * S;
  vec lane; for (int i = 0; i < L; ++i) lane[i] = float(i);
  vec best = splat(-INFINITY);
  for (int b = 0; b < blocks; ++b) {
    const T* k = kcache + (int64_t(table[b]) * K + head) * F * S;
    for (int s = 0; s < S; s += L) {
      vec sum = vec{};
      for (int f = 0; f < F; ++f) sum += load(k + f * S + s) * (scalar(q[f]) * scale);
      vec x = lane < splat(float(valid - b * S - s)) ? sum : splat(-INFINITY);
      best = best > x ? best : x;
      store(p + b * S + s, x);
    }
  }
  float peak = best[0];
  for (int i = 1; i < L; ++i) peak = best[i] > peak ? best[i] : peak;
  vec total = vec{};
  for (int i = 0; i < span; i += L) {
    vec x = exp_neg(load(p + i) - peak);
    total += x;
    store(p + i, x);
  }
  const float inverse = 1.0f / sum_lanes(total);
  float delta = 0;
  for (int b = 0; b < blocks; ++b) {
    const int64_t at = (int64_t(table[b]) * K + head) * S * F;
    const int n = valid - b * S < S ? valid - b * S : S;
    for (int t = 0; t < S; ++t) {
      const int j = b * S + t;
      p[j] *= inverse;
      ds[j] = 0;
      if (t >= n) continue;
      vec dot = vec{};
      for (int f = 0; f < F; f += L) {
        vec g = load(dout + f);
        dot += g * load(vcache + at + t * F + f);
        store(dv + at + t * F + f, load(dv + at + t * F + f) + g * p[j]);
      }
      ds[j] = sum_lanes(dot);
      delta += p[j] * ds[j];
    }
  }
  for (int f = 0; f < F; ++f) lanes[f] = vec{};
  for (int b = 0; b < blocks; ++b) {
    const int64_t at = (int64_t(table[b]) * K + head) * F * S;
    for (int s = 0; s < S; s += L) {
      vec d = load(p + b * S + s) * (load(ds + b * S + s) - delta) * scale;
      for (int f = 0; f < F; ++f) {
        lanes[f] += d * load(kcache + at + f * S + s);
        store(dk + at + f * S + s, load(dk + at + f * S + s) + d * scalar(q[f]));
      }
    }
  }
  for (int f = 0; f < F; ++f) dq[f] = sum_lanes(lanes[f]);
}

// dq [T, H, F], dk [B, K, F, S], dv [B, K, S, F], all fp32; dk and dv start at zero. Threads share nothing: each kv head
// has its own part of dk and dv, and adds to it in token order whatever their number.
template <typename T>
void paged_attention_backward(float* dq, float* dk, float* dv, const T* dout, const T* q, const T* k, const T* v,
                              const int32_t* tables, const int32_t* cu_q, const int32_t* seq_lens, int R,
                              int table_stride, int H, int K, int F, int S, float scale, int threads) {
  const int G = H / K;
  int longest = 0;
  for (int r = 0; r < R; ++r) longest = seq_lens[r] > longest ? seq_lens[r] : longest;
  const int span = (longest + S - 1) / S * S;
#pragma omp parallel for num_threads(threads) if (threads > 1 && K > 1)
  for (int head = 0; head < K; ++head) {
    std::vector<float> p(span), ds(span);
    std::vector<float> memory(size_t(F) * L);
    vec* lanes = reinterpret_cast<vec*>(memory.data());
    for (int r = 0; r < R; ++r) {
      const int n = cu_q[r + 1] - cu_q[r];
      for (int i = 0; i < n; ++i)
        for (int g = 0; g < G; ++g) {
          const int64_t row = (int64_t(cu_q[r] + i) * H + head * G + g) * F;
          attend_backward<T>(dq + row, dk, dv, dout + row, q + row, k, v, tables + int64_t(r) * table_stride,
                             seq_lens[r] - n + i + 1, K, head, F, S, scale, p.data(), ds.data(), lanes);
        }
    }
  }
}

template <typename T>
void write_kv(T* kcache, T* vcache, const T* key, const T* value, const int64_t* slots, int tokens, int K, int F,
              int S) {
  for (int t = 0; t < tokens; ++t) {
    const int64_t block = slots[t] / S, at = slots[t] % S;
    for (int h = 0; h < K; ++h) {
      const T* k = key + (int64_t(t) * K + h) * F;
      const T* v = value + (int64_t(t) * K + h) * F;
      T* to = kcache + (block * K + h) * F * S + at;
      for (int f = 0; f < F; ++f) to[f * S] = k[f];
      std::memcpy(vcache + ((block * K + h) * S + at) * F, v, F * sizeof(T));
    }
  }
}

}  // namespace

#define EXPORT(SUFFIX, T)                                                                                            \
  extern "C" void midstream_paged_attention_##SUFFIX(void* out, const void* q, const void* k, const void* v,         \
                                                     const int32_t* tables, const int32_t* cu_q,                     \
                                                     const int32_t* seq_lens, int R, int stride, int H, int K,       \
                                                     int F, int S, float scale, int threads) {                       \
    paged_attention<T>((T*)out, (const T*)q, (const T*)k, (const T*)v, tables, cu_q, seq_lens, R, stride, H, K, F,   \
                       S, scale, threads);                                                                           \
  }                                                                                                                  \
  extern "C" void midstream_paged_attention_backward_##SUFFIX(                                                       \
      float* dq, float* dk, float* dv, const void* dout, const void* q, const void* k, const void* v,                \
      const int32_t* tables, const int32_t* cu_q, const int32_t* seq_lens, int R, int stride, int H, int K, int F,   \
      int S, float scale, int threads) {                                                                             \
    paged_attention_backward<T>(dq, dk, dv, (const T*)dout, (const T*)q, (const T*)k, (const T*)v, tables, cu_q,     \
                                seq_lens, R, stride, H, K, F, S, scale, threads);                                    \
  }                                                                                                                  \
  extern "C" void midstream_write_kv_##SUFFIX(void* kc, void* vc, const void* k, const void* v,                      \
                                              const int64_t* slots, int tokens, int K, int F, int S) {               \
    write_kv<T>((T*)kc, (T*)vc, (const T*)k, (const T*)v, slots, tokens, K, F, S);                                   \
  }

EXPORT(f32, float)
EXPORT(bf16, bf16)
