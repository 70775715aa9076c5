// Paged attention and what writes its cache. One rule makes it exact: what is computed for a query token and a head is
// a fixed sequence of operations over that token's own context. Tokens of the context sit in vector lanes, blocks are
// visited in order, and query rows that are computed together share loads, never sums. So a token alone (decode) and
// in company (prefill, the trainer's forward) gets the same bits.
//
// Layouts (B blocks, K kv heads, F head dim, S block size, T tokens, H query heads, G = H / K). Two bf16 that are
// multiplied in one instruction are neighbours: P = 2 for bf16, 1 for fp32.
//   q, out [T, H, F]     key cache [B, K, F / P, S, P] (tokens in lanes)     value cache [B, K, S / P, F, P]

#include <cstddef>
#include <vector>

#include "jobs.h"
#include "rope.h"

namespace {

inline void prefetch(const void* p, size_t bytes) {
  for (size_t i = 0; i < bytes; i += 64) __builtin_prefetch((const char*)p + i);
}

// Rows that compute less in the time of a line's way from memory: with each line of their own they fetch one of what is
// read after it, into the second cache, which waits for more lines at a time than the first one.
constexpr int FEW = 6;
template <int ROWS> inline void fetch(const void* line) { if (ROWS <= FEW) __builtin_prefetch(line, 0, 2); }

template <typename T>
struct Shape {
  const T *keys, *values;
  const int32_t* table;
  int K, head, F, S;
  float scale;
  const Shape* next;  // what its thread reads afterwards; null: nothing
  int shift;          // from a block to the one of the next job that is as far from the end of its context
  const T* key(int block) const { return keys + (int64_t(table[block]) * K + head) * F * S; }
  const T* value(int block) const { return values + (int64_t(table[block]) * K + head) * F * S; }
  const T* next_key(int b) const { return next && b + shift >= 0 ? next->key(b + shift) : key(b); }
  const T* next_value(int b) const { return next && b + shift >= 0 ? next->value(b + shift) : value(b); }
};

// Scores of ROWS queries [ROWS, F] for LANES * L tokens, which may lie in several blocks: k[i] points to lane group i,
// next[i] to one of the next job.
template <typename T, int ROWS, int LANES>
inline void products(float* const* scores, const T* q, const T* const* k, const T* const* next, int F, int S,
                     float scale) {
  constexpr int P = Pair<T>::P;
  vec sum[ROWS][LANES] = {};
  for (int f = 0; f < F; f += P) {
    typename Pair<T>::wide keys[LANES];
    for (int i = 0; i < LANES; ++i) keys[i] = Pair<T>::get(k[i] + f * S);
    for (int i = 0; i < LANES; ++i) fetch<ROWS>(next[i] + f * S);
    for (int r = 0; r < ROWS; ++r) {
      auto query = Pair<T>::spread(q + r * F + f);
      for (int i = 0; i < LANES; ++i) Pair<T>::add(sum[r][i], keys[i], query);
    }
  }
  for (int r = 0; r < ROWS; ++r)
    for (int i = 0; i < LANES; ++i) store(scores[r] + i * L, sum[r][i] * scale);
}

// Scores of ROWS queries for the tokens of blocks [first, end) of their context.
template <typename T, int ROWS>
void score(float* const* scores, const T* q, const Shape<T>& at, int first, int end) {
  constexpr int P = Pair<T>::P, LANES = ROWS > 6 ? 2 : 4;
  const int per_block = at.S / L, groups = (end - first) * per_block;
  float* to[ROWS];
  for (int g = 0; g < groups;) {
    for (int r = 0; r < ROWS; ++r) to[r] = scores[r] + g * L;
    const T *k[LANES], *next[LANES];
    const int n = groups - g < LANES ? 1 : LANES;
    for (int i = 0; i < n; ++i) {
      const int block = first + (g + i) / per_block, lane = (g + i) % per_block * L * P;
      k[i] = at.key(block) + lane;
      next[i] = at.next_key(block) + lane;
    }
    if (g + n < groups) prefetch(at.key(first + (g + n) / per_block), size_t(at.F) * at.S * sizeof(T));
    if (n == LANES) products<T, ROWS, LANES>(to, q, k, next, at.F, at.S, at.scale);
    else products<T, ROWS, 1>(to, q, k, next, at.F, at.S, at.scale);
    g += n;
  }
}

// A query row on its way through the context, chunk by chunk (Milakov and Gimelshein 2018): what was summed so far is
// relative to the largest score so far.
struct Row {
  float max = -INFINITY, total = 0.0f, fade;  // fade: what the chunk at hand makes of the sums before it
};

// Scores of a chunk into probabilities (not yet divided), those from ``valid`` on zero; p gets them in T.
template <typename T>
void softmax(Row& row, T* p, float* scores, int valid, int span) {
  vec lane; for (int i = 0; i < L; ++i) lane[i] = float(i);
  vec best = splat(row.max);
  for (int i = 0; i < span; i += L) {
    vec x = load(scores + i);
    if (i + L > valid) {
      x = lane < splat(float(valid - i)) ? x : splat(-INFINITY);
      store(scores + i, x);
    }
    best = larger(best, x);
  }
  const float max = max_lanes(best);
  vec sum = vec{};
  for (int i = 0; i < span; i += L) {
    vec e = exp_as<T>(load(scores + i) - max);
    sum += e;
    store(p + i, e);
  }
  row.fade = exp_neg(splat(row.max - max))[0];
  row.total = row.total * row.fade + sum_lanes(sum);
  row.max = max;
}

// sum [ROWS][WIDTH * L] += p over tokens [from, to) of one block; ``from`` and ``to`` multiples of P.
template <typename T, int ROWS, int WIDTH>
inline void weigh(vec (&sum)[ROWS][WIDTH], const T* const* p, const T* v, const T* next, int F, int from, int to) {
  constexpr int P = Pair<T>::P;
  for (int t = from; t < to; t += P) {
    typename Pair<T>::wide values[WIDTH];
    for (int w = 0; w < WIDTH; ++w) values[w] = Pair<T>::get(v + t * F + w * L * P);
    for (int w = 0; w < WIDTH; ++w) fetch<ROWS>(next + t * F + w * L * P);
    for (int r = 0; r < ROWS; ++r) {
      auto weight = Pair<T>::spread(p[r] + t);
      for (int w = 0; w < WIDTH; ++w) Pair<T>::add(sum[r][w], values[w], weight);
    }
  }
}

// Values of blocks [first, end) of the context, weighed by p [ROWS, stride], onto the rows' sums. Of the block at which
// a row ends only the tokens before its ``valid`` are touched: a slot that was not written is never multiplied.
template <typename T, int ROWS, int WIDTH>
void combine(float* sums, const Row* rows, const T* p, int stride, const int* valid, const Shape<T>& at, int first,
             int end, int f) {
  constexpr int P = Pair<T>::P;
  const int whole = valid[0] / at.S < end ? valid[0] / at.S : end;  // blocks that all rows see to their end
  vec sum[ROWS][WIDTH];
  const T* from[ROWS];
  for (int r = 0; r < ROWS; ++r)
    for (int w = 0; w < WIDTH; ++w) sum[r][w] = load(sums + r * at.F + f + w * L) * rows[r].fade;
  for (int b = first; b < whole; ++b) {
    if (f == 0 && b + 1 < end) prefetch(at.value(b + 1), size_t(at.F) * at.S * sizeof(T));
    for (int r = 0; r < ROWS; ++r) from[r] = p + r * stride + (b - first) * at.S;
    weigh<T, ROWS, WIDTH>(sum, from, at.value(b) + f * P, at.next_value(b) + f * P, at.F, 0, at.S);
  }
  for (int r = 0; r < ROWS; ++r) {
    for (int b = whole; b < end; ++b) {
      const int n = valid[r] - b * at.S < at.S ? valid[r] - b * at.S : at.S;
      const T* own[1] = {p + r * stride + (b - first) * at.S};
      vec part[1][WIDTH];
      for (int w = 0; w < WIDTH; ++w) part[0][w] = sum[r][w];
      weigh<T, 1, WIDTH>(part, own, at.value(b) + f * P, at.next_value(b) + f * P, at.F, 0, n / P * P);
      if (n % P) {
        T row[WIDTH * L * P];
        std::memcpy(row, at.value(b) + f * P + (n - 1) * at.F, sizeof row);
        for (int i = 1; i < WIDTH * L * P; i += P) row[i] = T{};
        const auto weight = Pair<T>::spread(own[0] + n - 1);
        for (int w = 0; w < WIDTH; ++w) Pair<T>::add(part[0][w], Pair<T>::get(row + w * L * P), weight);
      }
      for (int w = 0; w < WIDTH; ++w) sum[r][w] = part[0][w];
    }
    for (int w = 0; w < WIDTH; ++w) store(sums + r * at.F + f + w * L, sum[r][w]);
  }
}

constexpr int MAX_ROWS = 12;
constexpr int RUN = 4;  // jobs that a thread takes at a time
constexpr int CHUNK = 512;  // tokens whose keys, scores and values stay in the caches near the core

// Blocks [first, end) of the context for ROWS queries of one kv head whose tokens lie in the same block.
// Scratch: scores and p of MAX_ROWS * span each, span = (end - first) * S.
template <typename T, int ROWS>
void attend(float* sums, Row* rows, const T* q, const int* valid, const Shape<T>& at, int first, int end, float* scores,
            T* p) {
  const int span = (end - first) * at.S;
  float* to[ROWS];
  for (int r = 0; r < ROWS; ++r) to[r] = scores + r * span;
  score<T, ROWS>(to, q, at, first, end);
  prefetch(at.value(first), size_t(at.F) * at.S * sizeof(T));
  for (int r = 0; r < ROWS; ++r) softmax(rows[r], p + r * span, to[r], valid[r] - first * at.S, span);
  constexpr int HALF = ROWS > 6 ? ROWS / 2 : ROWS;
  for (int r = 0; r < ROWS; r += HALF) {
    int f = 0;
    for (; f + 4 * L <= at.F; f += 4 * L)
      combine<T, HALF, 4>(sums + r * at.F, rows + r, p + r * span, span, valid + r, at, first, end, f);
    for (; f < at.F; f += L)
      combine<T, HALF, 1>(sums + r * at.F, rows + r, p + r * span, span, valid + r, at, first, end, f);
  }
}

template <typename T>
void attend_rows(int n, float* sums, Row* rows, const T* q, const int* valid, const Shape<T>& at, int first, int end,
                 float* scores, T* p) {
  while (n > 0) {
    const int taken = n >= 12 ? 12 : n >= 6 ? 6 : n >= 4 ? 4 : n;
    switch (taken) {
      case 12: attend<T, 12>(sums, rows, q, valid, at, first, end, scores, p); break;
      case 6: attend<T, 6>(sums, rows, q, valid, at, first, end, scores, p); break;
      case 4: attend<T, 4>(sums, rows, q, valid, at, first, end, scores, p); break;
      case 3: attend<T, 3>(sums, rows, q, valid, at, first, end, scores, p); break;
      case 2: attend<T, 2>(sums, rows, q, valid, at, first, end, scores, p); break;
      default: attend<T, 1>(sums, rows, q, valid, at, first, end, scores, p);
    }
    sums += taken * at.F; rows += taken; q += taken * at.F; valid += taken; n -= taken;
  }
}

template <typename T>
void paged_attention(T* out, const T* q, const T* k, const T* v, const int32_t* tables, const int32_t* cu_q,
                     const int32_t* seq_lens, int R, int table_stride, int H, int K, int F, int S, float scale,
                     int threads) {
  const int G = H / K;
  struct Job { int32_t request, token, position, count; };  // count tokens of one request, all in one block
  std::vector<Job> jobs;
  int most = 0;
  for (int r = 0; r < R; ++r) {
    const int n = cu_q[r + 1] - cu_q[r], first = seq_lens[r] - n;
    for (int i = 0; i < n;) {
      int count = S - (first + i) % S;
      count = count < n - i ? count : n - i;
      jobs.push_back({r, cu_q[r] + i, first + i, count});
      most = count > most ? count : most;
      i += count;
    }
  }
  const int64_t count = int64_t(jobs.size()) * K;
  const int chunk = S < CHUNK ? CHUNK / S : 1;  // blocks; fixed, so a row's sums begin and end at the same positions
  std::atomic<int64_t> taken{0};
  Meeting end;
#pragma omp parallel num_threads(threads) if (threads > 1 && count > 1)
  {
    const size_t rows = size_t(most) * G, scratch = size_t(MAX_ROWS) * chunk * S;
    std::vector<float> scores(scratch), sums(rows * F);
    std::vector<T> p(scratch), queries(rows * F);
    std::vector<Row> states(rows);
    std::vector<int> valid(rows);
    const auto shape = [&](int64_t i, const Shape<T>* next, int shift) {
      const int32_t* table = tables + int64_t(jobs[i / K].request) * table_stride;
      return Shape<T>{k, v, table, K, int(i % K), F, S, scale, next, shift};
    };
    for (Turn turn(taken, count, RUN); turn.job < count; turn.advance()) {
      const int64_t i = turn.job;
      const Job& job = jobs[i / K];
      const int head = int(i % K), n = job.count * G, blocks = job.position / S + 1;
      auto place = [&](int r) { return (int64_t(job.token + r / G) * H + head * G + r % G) * F; };
      for (int r = 0; r < n; ++r) {
        std::memcpy(&queries[size_t(r) * F], q + place(r), F * sizeof(T));
        valid[r] = job.position + r / G + 1;
        states[r] = Row();
      }
      std::memset(sums.data(), 0, size_t(n) * F * sizeof(float));
      const int64_t then = turn.next < count ? turn.next : i;
      const Shape<T> next = shape(then, nullptr, 0), at = shape(i, &next, jobs[then / K].position / S + 1 - blocks);
      for (int b = 0; b < blocks; b += chunk)
        attend_rows<T>(n, sums.data(), states.data(), queries.data(), valid.data(), at, b,
                       b + chunk < blocks ? b + chunk : blocks, scores.data(), p.data());
      for (int r = 0; r < n; ++r)
        for (int f = 0; f < F; f += L) store(out + place(r) + f, load(&sums[size_t(r) * F + f]) / states[r].total);
    }
    end.wait();
  }
}

// Gradients of all queries of one request and one kv head. Keys and values come as rows [span, F] and with tokens in
// lanes [F, span]; their gradients are rows. Query rows go in tiles of at most TILE. q, dout [rows, F] are fp32 copies.
constexpr int TILE = 8;

struct Gradient {
  int F, span;
  float scale;
  const float *k, *v, *k_lanes, *v_lanes;
  float *dk, *dv, *p, *ds;  // p, ds: scratch [TILE, span]

  // One row's probabilities and the gradient of its scores; zero from ``valid`` to ``end``.
  void scores(float* p, float* ds, const float* q, const float* dout, int valid, int end) const {
    vec lane; for (int i = 0; i < L; ++i) lane[i] = float(i);
    vec best = splat(-INFINITY);
    for (int j = 0; j < end; j += L) {
      vec sum = vec{}, dot = vec{};
      for (int f = 0; f < F; ++f) {
        sum += load(k_lanes + int64_t(f) * span + j) * q[f];
        dot += load(v_lanes + int64_t(f) * span + j) * dout[f];
      }
      ivec live = lane < splat(float(valid - j));
      sum = live ? sum * scale : splat(-INFINITY);
      best = larger(best, sum);
      store(p + j, sum);
      store(ds + j, dot);
    }
    const float peak = max_lanes(best);
    vec total = vec{}, inner = vec{};
    for (int j = 0; j < end; j += L) {
      vec e = exp_neg(load(p + j) - peak);
      total += e;
      inner += e * load(ds + j);
      store(p + j, e);
    }
    const float inverse = 1.0f / sum_lanes(total), delta = sum_lanes(inner) * inverse;
    for (int j = 0; j < end; j += L) {
      vec weight = load(p + j) * inverse;
      store(p + j, weight);
      store(ds + j, weight * (load(ds + j) - delta) * scale);
    }
  }

  void tile(float* const* dq, const float* q, const float* dout, const int* valid, int rows) const {
    const int end = (valid[rows - 1] + L - 1) / L * L;  // the last row sees the most
    for (int r = 0; r < rows; ++r)
      scores(p + r * span, ds + r * span, q + r * F, dout + r * F, valid[r], end);
    for (int f = 0; f < F; f += L) {
      for (int r = 0; r < rows; ++r) {
        vec sum = vec{};
        for (int j = 0; j < valid[r]; ++j) sum += load(k + j * F + f) * ds[r * span + j];
        store(dq[r] + f, sum);
      }
      for (int j = 0; j < valid[rows - 1]; ++j) {
        vec to_k = load(dk + j * F + f), to_v = load(dv + j * F + f);
        for (int r = 0; r < rows; ++r) {
          to_k += load(q + r * F + f) * ds[r * span + j];
          to_v += load(dout + r * F + f) * p[r * span + j];
        }
        store(dk + j * F + f, to_k);
        store(dv + j * F + f, to_v);
      }
    }
  }
};

// k, v [B, S, K, F]; dq [T, H, F], dk, dv as k and v, all fp32; dk and dv start at zero. Each (request, kv head) has
// sums of its own; then each head adds them up in the order of the requests: no bit depends on the number of threads.
template <typename T>
void paged_attention_backward(float* dq, float* dk, float* dv, const T* dout, const T* q, const T* k, const T* v,
                              const int32_t* tables, const int32_t* cu_q, const int32_t* seq_lens, int R,
                              int table_stride, int H, int K, int F, int S, float scale, int threads) {
  const int G = H / K;
  std::vector<int64_t> starts(R + 1);
  int longest = 0;
  for (int r = 0; r < R; ++r) {
    starts[r + 1] = starts[r] + seq_lens[r];
    longest = seq_lens[r] > longest ? seq_lens[r] : longest;
  }
  const int span = (longest + L - 1) / L * L;
  std::vector<float> sums(size_t(starts[R]) * K * F * 2);
  auto place = [&](int r, int j, int head) {
    return ((int64_t(tables[int64_t(r) * table_stride + j / S]) * S + j % S) * K + head) * F;
  };
  auto sum_of = [&](int r, int head) { return sums.data() + (starts[r] * K + int64_t(head) * seq_lens[r]) * F * 2; };
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    std::vector<float> rows(size_t(span) * F * 2), lanes(rows.size());
    std::vector<float> scratch(size_t(TILE) * span * 2), in(TILE * F * 2);
#pragma omp for schedule(dynamic, 1)
    for (int i = 0; i < R * K; ++i) {
      const int r = i / K, head = i % K, length = seq_lens[r], n = cu_q[r + 1] - cu_q[r];
      float *ks = rows.data(), *vs = ks + size_t(span) * F, *kl = lanes.data(), *vl = kl + size_t(span) * F;
      for (int j = 0; j < length; ++j) {
        const int64_t at = place(r, j, head);
        for (int f = 0; f < F; ++f) {
          ks[j * F + f] = kl[int64_t(f) * span + j] = scalar(k[at + f]);
          vs[j * F + f] = vl[int64_t(f) * span + j] = scalar(v[at + f]);
        }
      }
      float* own = sum_of(r, head);
      float *dv_own = own + int64_t(length) * F, *scores = scratch.data();
      Gradient of{F, span, scale, ks, vs, kl, vl, own, dv_own, scores, scores + size_t(TILE) * span};
      float *qs = in.data(), *ds = qs + TILE * F;
      float* to[TILE];
      int valid[TILE], count = 0;
      for (int t = 0; t < n; ++t)
        for (int g = 0; g < G; ++g) {
          const int64_t row = (int64_t(cu_q[r] + t) * H + head * G + g) * F;
          for (int f = 0; f < F; f += L) {
            store(qs + count * F + f, load(q + row + f));
            store(ds + count * F + f, load(dout + row + f));
          }
          to[count] = dq + row;
          valid[count++] = length - n + t + 1;
          if (count == TILE || (t == n - 1 && g == G - 1)) {
            of.tile(to, qs, ds, valid, count);
            count = 0;
          }
        }
    }
#pragma omp for schedule(static, 1)
    for (int head = 0; head < K; ++head)
      for (int r = 0; r < R; ++r) {
        const float* own = sum_of(r, head);
        for (int j = 0; j < seq_lens[r]; ++j) {
          const int64_t at = place(r, j, head);
          for (int f = 0; f < F; f += L) {
            store(dk + at + f, load(dk + at + f) + load(own + j * F + f));
            store(dv + at + f, load(dv + at + f) + load(own + (int64_t(seq_lens[r]) + j) * F + f));
          }
        }
      }
  }
}

template <typename T>
void write_kv(T* kcache, T* vcache, const T* key, const T* value, const int64_t* slots, int tokens, int K, int F,
              int S, int threads) {
  constexpr int P = Pair<T>::P;
#pragma omp parallel for num_threads(threads) if (threads > 1 && int64_t(tokens) * K * F >= GRAIN)
  for (int t = 0; t < tokens; ++t) {
    const int64_t block = slots[t] / S, at = slots[t] % S;
    for (int h = 0; h < K; ++h) {
      const T* k = key + (int64_t(t) * K + h) * F;
      const T* v = value + (int64_t(t) * K + h) * F;
      T* to = kcache + (block * K + h) * F * S + at * P;
      for (int f = 0; f < F; f += P)
        for (int i = 0; i < P; ++i) to[f * S + i] = k[f + i];
      T* row = vcache + (block * K + h) * S * F + at / P * P * F + at % P;
      for (int f = 0; f < F; ++f) row[f * P] = v[f];
    }
  }
}

}  // namespace

#define EXPORT(SUFFIX, T)                                                                                            \
  extern "C" void midstream_paged_attention_##SUFFIX(T* out, const T* q, const T* k, const T* v,                     \
                                                     const int32_t* tables, const int32_t* cu_q,                     \
                                                     const int32_t* seq_lens, int R, int stride, int H, int K,       \
                                                     int F, int S, float scale, int threads) {                       \
    paged_attention<T>(out, q, k, v, tables, cu_q, seq_lens, R, stride, H, K, F, S, scale, threads);                 \
  }                                                                                                                  \
  extern "C" void midstream_paged_attention_backward_##SUFFIX(                                                       \
      float* dq, float* dk, float* dv, const T* dout, const T* q, const T* k, const T* v, const int32_t* tables,     \
      const int32_t* cu_q, const int32_t* seq_lens, int R, int stride, int H, int K, int F, int S, float scale,      \
      int threads) {                                                                                                 \
    paged_attention_backward<T>(dq, dk, dv, dout, q, k, v, tables, cu_q, seq_lens, R, stride, H, K, F, S, scale,     \
                                threads);                                                                            \
  }                                                                                                                  \
  extern "C" void midstream_write_kv_##SUFFIX(T* kc, T* vc, const T* k, const T* v, const int64_t* slots,            \
                                              int tokens, int K, int F, int S, int threads) {                        \
    write_kv<T>(kc, vc, k, v, slots, tokens, K, F, S, threads);                                                      \
  }

// What a layer of the engine does between two products: split, norms, rope, write, attend. scratch: [T, (H + 2K) F].
#define EXPORT_LAYER(SUFFIX, T)                                                                                      \
  extern "C" void midstream_rope_attention_##SUFFIX(                                                                 \
      T* out, T* scratch, T* kc, T* vc, const T* qkv, const int64_t* positions, const float* cos, const float* sin,  \
      const T* q_norm, const T* k_norm, const int64_t* slots, const int32_t* tables, const int32_t* cu_q,            \
      const int32_t* seq_lens, int64_t rows, int R, int stride, int H, int K, int F, int S, float scale, float eps,  \
      int threads) {                                                                                                 \
    T *q = scratch, *k = q + rows * H * F, *v = k + rows * K * F;                                                    \
    split_rope<T>(q, k, v, qkv, positions, cos, sin, q_norm, k_norm, rows, H, K, F, eps, threads);                   \
    write_kv<T>(kc, vc, k, v, slots, int(rows), K, F, S, threads);                                                   \
    paged_attention<T>(out, q, kc, vc, tables, cu_q, seq_lens, R, stride, H, K, F, S, scale, threads);               \
  }

EXPORT_LAYER(f32, float)
EXPORT_LAYER(bf16, bf16)
EXPORT(f32, float)
EXPORT(bf16, bf16)
