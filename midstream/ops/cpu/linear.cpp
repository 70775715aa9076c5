// The row-stable product: x [R, K] times a packed weight [N, K] -> [R, N]. An output is one sum over k in order, whatever
// rows are computed with it, so a row's bits depend on that row alone.
//
// A packed weight stands in panels of WIDTH outputs, [N / WIDTH, K / P, WIDTH, P]: the outputs of a panel are vector
// lanes, and a panel is read from memory once, in order, for up to TOGETHER rows of x. The rows of a block share each
// load of the weight in registers; each value of x is spread over the lanes.

#include "jobs.h"
#include "lanes.h"

namespace {

constexpr int VECTORS = 3, WIDTH = VECTORS * L;
constexpr int64_t TOGETHER = 256, LINE = 64;
#ifdef __AVX512F__
constexpr int ROWS_AT_ONCE = 8;  // 24 of 32 registers are sums
#else
constexpr int ROWS_AT_ONCE = 2;
#endif

// Rows that share each load of the weight. LINES: how many of memory, from ``ahead`` on, are fetched for each of those.
template <typename T, int ROWS, int LINES>
inline void block(T* out, int64_t N, const T* x, const T* panel, int K, int width, const char* ahead) {
  constexpr int P = Pair<T>::P;
  vec sum[ROWS][VECTORS] = {};
  for (int k = 0; k < K; k += P) {
    typename Pair<T>::wide weight[VECTORS];
    for (int i = 0; i < VECTORS; ++i) weight[i] = Pair<T>::get(panel + (k * VECTORS + i * P) * L);
    for (int i = 0; i < LINES; ++i) __builtin_prefetch(ahead + (int64_t(k / P) * LINES + i) * LINE, 0, 2);
    for (int r = 0; r < ROWS; ++r) {
      auto value = Pair<T>::spread(x + int64_t(r) * K + k);
      for (int i = 0; i < VECTORS; ++i) Pair<T>::add(sum[r][i], weight[i], value);
    }
  }
  for (int r = 0; r < ROWS; ++r)
    for (int i = 0; i < VECTORS; ++i) {
      T* to = out + r * N + i * L;
      if (i * L + L <= width) store(to, sum[r][i]);
      else for (int j = 0; i * L + j < width; ++j) { T lanes[L]; store(lanes, sum[r][i]); to[j] = lanes[j]; }
    }
}

// Fewer rows than a block.
template <typename T, int ROWS>
inline void rest(T* out, int64_t N, const T* x, const T* panel, int K, int width, int64_t rows) {
  if constexpr (ROWS > 0) {
    if (rows == ROWS) block<T, ROWS, 0>(out, N, x, panel, K, width, nullptr);
    else rest<T, ROWS - 1>(out, N, x, panel, K, width, rows);
  }
}

// All rows of one panel. The first block waits for memory; the others meanwhile fetch the panel that comes ``next``
// (null: none) into the second cache, which keeps this one too.
template <typename T>
inline void blocks(T* out, int64_t N, const T* x, const T* panel, int K, int width, int64_t rows, const T* next) {
  constexpr int ROWS = ROWS_AT_ONCE;
  const int64_t whole = rows / ROWS, others = next ? whole - 1 : 0;
  const int lines = others < 1 ? 0 : others == 1 ? 3 : others == 2 ? 2 : 1;  // a step reads VECTORS = 3 itself
  const char *ahead = reinterpret_cast<const char*>(next), *end = next ? ahead + int64_t(K) * WIDTH * sizeof(T) : ahead;
  for (int64_t i = 0; i < whole; ++i, out += ROWS * N, x += ROWS * K) {
    const int now = i == 0 || ahead >= end ? 0 : lines;
    switch (now) {
      case 3: block<T, ROWS, 3>(out, N, x, panel, K, width, ahead); break;
      case 2: block<T, ROWS, 2>(out, N, x, panel, K, width, ahead); break;
      case 1: block<T, ROWS, 1>(out, N, x, panel, K, width, ahead); break;
      default: block<T, ROWS, 0>(out, N, x, panel, K, width, nullptr);
    }
    ahead += int64_t(now) * (K / Pair<T>::P) * LINE;
  }
  rest<T, ROWS - 1>(out, N, x, panel, K, width, rows - whole * ROWS);
}

template <typename T>
void linear(T* out, const T* x, const T* weight, int64_t rows, int64_t N, int K, int threads) {
  const int64_t panels = (N + WIDTH - 1) / WIDTH, parts = (rows + TOGETHER - 1) / TOGETHER, jobs = parts * panels;
  std::atomic<int64_t> taken{0};
  Meeting end;
#pragma omp parallel num_threads(threads) if (threads > 1 && rows * N * K >= 16 * GRAIN)
  {
    for (Turn turn(taken, jobs, 1); turn.job < jobs; turn.advance()) {
      const int64_t first = turn.job / panels * TOGETHER, at = turn.job % panels * WIDTH;
      const int64_t count = rows - first < TOGETHER ? rows - first : TOGETHER;
      blocks<T>(out + first * N + at, N, x + first * K, weight + at * K, K, int(N - at < WIDTH ? N - at : WIDTH), count,
                turn.next < jobs ? weight + turn.next % panels * WIDTH * K : nullptr);
    }
    end.wait();
  }
}

}  // namespace

#define EXPORT(SUFFIX, T)                                                                                            \
  extern "C" void midstream_linear_##SUFFIX(T* out, const T* x, const T* weight, int64_t rows, int64_t N, int K,     \
                                            int threads) {                                                           \
    linear<T>(out, x, weight, rows, N, K, threads);                                                                  \
  }

EXPORT(f32, float)
EXPORT(bf16, bf16)
