// From logits to a token: log-sum-exp, truncation by selection, one uniform per token, inverse transform in the order
// of ids. A row is one thread's; its vocabulary is cut into slices whose sums are added in order.

#include <algorithm>
#include <functional>
#include <utility>
#include <vector>

#include "lanes.h"

namespace {

constexpr int SLICE = 1024;
using Candidate = std::pair<float, int32_t>;  // value, id

// What a row's logits go through before anything is computed: division, and everything below a threshold left out.
struct Keep {
  float temperature = 1.0f;
  float least = -INFINITY;    // smallest value kept (after the division) ...
  int32_t last = INT32_MAX;   // ... and of several tokens with it, the last id kept
};

struct Total {
  float max;     // of the values kept
  double sum;    // of exp(value - max)
};

template <typename T>
inline vec values(const T* x, int i, int V, const Keep& keep) {
  vec v;
  if (i + L <= V) {
    v = load(x + i);
  } else {
    v = splat(-INFINITY);
    for (int j = 0; i + j < V; ++j) v[j] = scalar(x[i + j]);
  }
  if (keep.temperature != 1.0f) v = v / keep.temperature;
  if (keep.least != -INFINITY) {
    ivec id; for (int j = 0; j < L; ++j) id[j] = i + j;
    ivec in = (v > keep.least) | ((v == keep.least) & (id <= keep.last));
    v = in ? v : splat(-INFINITY);
  }
  return v;
}

template <typename T>
inline float value(const T* x, int id, const Keep& keep) {
  float v = scalar(x[id]);
  return keep.temperature == 1.0f ? v : v / keep.temperature;
}

template <typename T>
float largest(const T* x, int V, float temperature) {
  Keep keep;
  vec best = splat(-INFINITY), odd = vec{};
  for (int i = 0; i < V; i += L) {
    vec v = values(x, i, V, keep);
    best = larger(best, v);
    odd = v < INFINITY ? odd : splat(1.0f);  // NaN or +inf
  }
  const float max = max_lanes(best);
  return sum_lanes(odd) > 0.0f || max == -INFINITY ? NAN : max / temperature;
}

// One definition for the sampler and for the trainer: not inlined, so that both run the same instructions.
// sums [slices]: of each slice's exp(value - max).
template <typename T>
__attribute__((noinline)) Total total(const T* x, int V, const Keep& keep, float* sums) {
  Total out{largest(x, V, keep.temperature), 0.0};
  for (int at = 0, n = 0; at < V; at += SLICE, ++n) {
    vec sum = vec{};
    const int end = at + SLICE < V ? at + SLICE : V;
    for (int i = at; i < end; i += L) sum += exp_neg(values(x, i, V, keep) - out.max);
    sums[n] = sum_lanes(sum);
    out.sum += sums[n];
  }
  return out;
}

inline float logprob(float v, const Total& t) { return float(double(v) - t.max - std::log(t.sum)); }

inline bool before(const Candidate& a, const Candidate& b) {
  return a.first > b.first || (a.first == b.first && a.second < b.second);
}

// The first token whose value is ``max``; -1 where that is NaN.
template <typename T>
int first(const T* x, int V, const Keep& keep, float max) {
  for (int i = 0; i < V; i += L) {
    vec v = values(x, i, V, keep);
    if (any(v >= max))
      for (int j = 0; j < L; ++j)
        if (v[j] >= max) return i + j;
  }
  return -1;
}

// The count most likely tokens, best first, ties by id. A lane's maximum over some vectors is one token's value, so at
// least count tokens reach the count-th largest of these maxima: only those are looked at one by one.
template <typename T>
void top(const T* x, int V, const Keep& keep, int count, std::vector<Candidate>& out) {
  out.clear();
  count = count < V ? count : V;
  int group = SLICE;
  while (group > L && V / group * L < 2 * count) group /= 2;
  std::vector<float> maxima;
  for (int at = 0; at < V; at += group) {
    vec best = splat(-INFINITY);
    for (int i = at; i < at + group && i < V; i += L) {
      vec v = values(x, i, V, keep);
      best = larger(best, v);
    }
    maxima.resize(maxima.size() + L);
    store(&maxima[maxima.size() - L], best);
  }
  float floor = -INFINITY;
  if (count <= int(maxima.size())) {
    std::vector<float> ranked(maxima);
    std::nth_element(ranked.begin(), ranked.begin() + (count - 1), ranked.end(), std::greater<float>());
    floor = ranked[count - 1];
  }
  for (int at = 0, n = 0; at < V; at += group, n += L) {
    if (max_lanes(load(&maxima[n])) < floor) continue;
    for (int i = at; i < at + group && i < V; i += L) {
      vec v = values(x, i, V, keep);
      if (!any(v >= floor)) continue;
      for (int j = 0; j < L && i + j < V; ++j)
        if (v[j] >= floor && v[j] > -INFINITY) out.emplace_back(v[j], i + j);
    }
  }
  if (count < int(out.size())) {
    std::nth_element(out.begin(), out.begin() + count, out.end(), before);
    out.resize(count);
  }
  std::sort(out.begin(), out.end(), before);
}

// min-p, then top-k, then top-p within them, as a threshold.
template <typename T>
Keep truncate(const T* x, int V, float temperature, int top_k, float top_p, float log_min_p, float* sums) {
  Keep keep;
  keep.temperature = temperature;
  if (log_min_p > -INFINITY) keep.least = largest(x, V, temperature) + log_min_p;
  std::vector<Candidate> found;
  if (top_k > 0 && top_k < V) {
    top(x, V, keep, top_k, found);
    if (int(found.size()) == top_k) { keep.least = found.back().first; keep.last = found.back().second; }
  }
  if (top_p < 1.0f) {
    const Total t = total(x, V, keep, sums);
    for (int count = 256;; count *= 8) {
      top(x, V, keep, count, found);
      double mass = 0;
      size_t n = 0;
      while (n < found.size() && (n == 0 || mass < double(top_p) * t.sum)) {
        mass += exp_neg(splat(found[n].first - t.max))[0];
        ++n;
      }
      if (n == 0) break;  // nothing is finite
      if (mass >= double(top_p) * t.sum || int(found.size()) < count || count >= V) {
        keep.least = found[n - 1].first;
        keep.last = found[n - 1].second;
        break;
      }
    }
  }
  return keep;
}

template <typename T>
int draw(const T* x, int V, const Keep& keep, const Total& t, const float* sums, float u) {
  const double target = double(u) * t.sum;
  double reached = 0, start = 0;
  int slice = 0;  // the first whose end passes the target; where rounding lets none, the last with any probability
  for (int n = 0; n * SLICE < V && reached <= target; ++n) {
    if (!(sums[n] > 0.0f)) continue;
    slice = n;
    start = reached;
    reached += sums[n];
  }
  int chosen = 0;
  const int end = (slice + 1) * SLICE < V ? (slice + 1) * SLICE : V;
  for (int i = slice * SLICE; i < end; i += L) {
    vec e = exp_neg(values(x, i, V, keep) - t.max);
    for (int j = 0; j < L && i + j < end; ++j) {
      if (!(e[j] > 0.0f)) continue;
      chosen = i + j;
      start += e[j];
      if (start > target) return chosen;
    }
  }
  return chosen;
}

}  // namespace

// Plain data, one for each row; the names are those of SamplingParams.
struct Row {
  float temperature;   // > 0; for a greedy row 1
  float top_p, log_min_p, uniform;
  int32_t top_k, greedy, num_top, top_of_processed;
  int32_t wants_rank;
};
struct Drawn {
  float raw, processed;      // logprobs of the token; NaN: the logits are not finite
  float least, temperature;  // what was kept: value / temperature above least, or equal up to id last
  int32_t last, token, rank;
};

namespace {

template <typename T>
void sample(Drawn* out, int32_t* top_ids, float* top_logprobs, const T* logits, const T* raw_logits, const Row* rows,
            int R, int V, int max_top, int threads) {
#pragma omp parallel num_threads(threads) if (threads > 1 && R > 1)
  {
    std::vector<float> sums((V + SLICE - 1) / SLICE), raw_sums(sums.size());
    std::vector<Candidate> found;
#pragma omp for schedule(dynamic, 1)
    for (int r = 0; r < R; ++r) {
      const Row& row = rows[r];
      const T *x = logits + int64_t(r) * V, *raw = raw_logits + int64_t(r) * V;
      const Keep all;
      Keep keep;
      keep.temperature = row.temperature;
      if (!row.greedy && (row.top_k > 0 || row.top_p < 1.0f || row.log_min_p > -INFINITY))
        keep = truncate(x, V, row.temperature, row.top_k, row.top_p, row.log_min_p, sums.data());
      const Total raw_total = total(raw, V, all, raw_sums.data());
      const bool same = x == raw && row.temperature == 1.0f && keep.least == -INFINITY;
      const Total t = same ? raw_total : total(x, V, keep, sums.data());
      int token = 0;
      if (row.greedy) {
        token = std::max(first(x, V, keep, t.max), 0);
      } else {
        token = draw(x, V, keep, t, same ? raw_sums.data() : sums.data(), row.uniform);
      }
      Drawn& d = out[r];
      d = {logprob(scalar(raw[token]), raw_total), row.greedy ? 0.0f : logprob(value(x, token, keep), t),
           keep.least, keep.temperature, keep.last, token, row.wants_rank};
      if (raw_total.max != raw_total.max) d.raw = NAN;
      if (row.wants_rank && scalar(raw[token]) < raw_total.max) {
        const vec mine = splat(scalar(raw[token]));
        ivec more = ivec{};
        for (int i = 0; i < V; i += L) more -= values(raw, i, V, all) > mine;
        for (int j = 0; j < L; ++j) d.rank += more[j];
      }
      if (row.num_top > 0) {
        const bool processed = row.top_of_processed;
        const T* from = processed ? x : raw;
        const Keep& of = processed ? keep : all;
        const Total& total = processed ? t : raw_total;
        found.clear();
        if (row.num_top > 1) top(from, V, of, row.num_top, found);
        else if (int id = first(from, V, of, total.max); id >= 0) found.emplace_back(total.max, id);
        for (int i = 0; i < row.num_top; ++i) {
          const bool is = i < int(found.size());
          top_ids[r * max_top + i] = is ? found[i].second : -1;
          top_logprobs[r * max_top + i] = is ? logprob(found[i].first, total) : -INFINITY;
        }
      }
    }
  }
}

// Logprobs of given ids under the truncated distribution; keeps what the backward needs.
template <typename T>
void logprobs(float* out, float* kept, double* kept_sums, const T* logits, const int64_t* ids, const Row* rows, int R,
              int V, int threads) {
#pragma omp parallel num_threads(threads) if (threads > 1 && R > 1)
  {
    std::vector<float> sums((V + SLICE - 1) / SLICE);
#pragma omp for schedule(dynamic, 1)
    for (int r = 0; r < R; ++r) {
      const Row& row = rows[r];
      const T* x = logits + int64_t(r) * V;
      Keep keep;
      keep.temperature = row.temperature;
      if (row.top_k > 0 || row.top_p < 1.0f || row.log_min_p > -INFINITY)
        keep = truncate(x, V, row.temperature, row.top_k, row.top_p, row.log_min_p, sums.data());
      const Total t = total(x, V, keep, sums.data());
      const float v = value(x, int(ids[r]), keep);
      const bool in = v > keep.least || (v == keep.least && ids[r] <= keep.last);
      out[r] = in ? logprob(v, t) : -INFINITY;
      kept[r * 3] = t.max;
      kept[r * 3 + 1] = keep.least;
      std::memcpy(kept + r * 3 + 2, &keep.last, 4);
      kept_sums[r] = t.sum;
    }
  }
}

// d logits = grad * (onehot(id) - softmax) / temperature.
template <typename T>
void logprobs_backward(T* dlogits, const float* grad, const float* kept, const double* kept_sums, const T* logits,
                       const int64_t* ids, const Row* rows, int R, int V, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1 && R > 1)
  for (int r = 0; r < R; ++r) {
    Keep keep;
    keep.temperature = rows[r].temperature;
    keep.least = kept[r * 3 + 1];
    std::memcpy(&keep.last, kept + r * 3 + 2, 4);
    const T* x = logits + int64_t(r) * V;
    T* to = dlogits + int64_t(r) * V;
    const float g = grad[r] / keep.temperature, scale = -g / float(kept_sums[r]);
    for (int i = 0; i < V; i += L) {
      vec p = exp_neg(values(x, i, V, keep) - kept[r * 3]) * scale;
      for (int j = 0; i <= ids[r] && ids[r] < i + L && j < L; ++j)
        if (i + j == ids[r]) p[j] += g;
      if (i + L <= V) {
        store(to + i, p);
      } else {
        T last[L];
        store(last, p);
        std::memcpy(to + i, last, size_t(V - i) * sizeof(T));
      }
    }
  }
}

}  // namespace

#define EXPORT(SUFFIX, T)                                                                                            \
  extern "C" void midstream_sample_##SUFFIX(Drawn* out, int32_t* top_ids, float* top_logprobs, const T* logits,      \
                                            const T* raw_logits, const Row* rows, int R, int V, int max_top,         \
                                            int threads) {                                                           \
    sample<T>(out, top_ids, top_logprobs, logits, raw_logits, rows, R, V, max_top, threads);                         \
  }                                                                                                                  \
  extern "C" void midstream_logprobs_##SUFFIX(float* out, float* kept, double* kept_sums, const T* logits,           \
                                              const int64_t* ids, const Row* rows, int R, int V, int threads) {      \
    logprobs<T>(out, kept, kept_sums, logits, ids, rows, R, V, threads);                                             \
  }                                                                                                                  \
  extern "C" void midstream_logprobs_backward_##SUFFIX(T* dlogits, const float* grad, const float* kept,             \
                                                       const double* kept_sums, const T* logits,                     \
                                                       const int64_t* ids, const Row* rows, int R, int V,            \
                                                       int threads) {                                                \
    logprobs_backward<T>(dlogits, grad, kept, kept_sums, logits, ids, rows, R, V, threads);                          \
  }

EXPORT(f32, float)
EXPORT(bf16, bf16)
