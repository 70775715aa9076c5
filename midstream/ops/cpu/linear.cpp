// The row-stable product: x [R, K] times a packed weight [N, K] -> [R, N]. An output is one sum over k in order, whatever
// rows are computed with it, so a row's bits depend on that row alone.
//
// A packed weight stands in panels of WIDTH outputs, [N / WIDTH, K / P, WIDTH, P]: the outputs of a panel are vector
// lanes, and a panel is read from memory once, in order, for up to TOGETHER rows of x. The rows of a block share each
// load of the weight in registers; each value of x is spread over the lanes.

#include "lanes.h"

namespace {

constexpr int VECTORS = 3, WIDTH = VECTORS * L;
constexpr int64_t TOGETHER = 256;
#ifdef __AVX512F__
constexpr int ROWS_AT_ONCE = 8;  // 24 of 32 registers are sums
#else
constexpr int ROWS_AT_ONCE = 2;
#endif

template <typename T, int ROWS>
inline void block(T* out, int64_t N, const T* x, const T* panel, int K, int width) {
  constexpr int P = Pair<T>::P;
  vec sum[ROWS][VECTORS] = {};
  for (int k = 0; k < K; k += P) {
    typename Pair<T>::wide weight[VECTORS];
    for (int i = 0; i < VECTORS; ++i) weight[i] = Pair<T>::get(panel + (k * VECTORS + i * P) * L);
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

template <typename T, int ROWS>
inline int64_t blocks(T* out, int64_t N, const T* x, const T* panel, int K, int width, int64_t rows) {
  if constexpr (ROWS > 0) {
    int64_t done = 0;
    for (; done + ROWS <= rows; done += ROWS) block<T, ROWS>(out + done * N, N, x + done * K, panel, K, width);
    if (done < rows) blocks<T, ROWS - 1>(out + done * N, N, x + done * K, panel, K, width, rows - done);
  }
  return rows;
}

template <typename T>
void linear(T* out, const T* x, const T* weight, int64_t rows, int64_t N, int K, int threads) {
  const int64_t panels = (N + WIDTH - 1) / WIDTH, parts = (rows + TOGETHER - 1) / TOGETHER;
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads) if (threads > 1 && rows * N * K >= 16 * GRAIN)
  for (int64_t job = 0; job < parts * panels; ++job) {
    const int64_t first = job / panels * TOGETHER, at = job % panels * WIDTH;
    const int64_t count = rows - first < TOGETHER ? rows - first : TOGETHER;
    blocks<T, ROWS_AT_ONCE>(out + first * N + at, N, x + first * K, weight + at * K, K,
                            int(N - at < WIDTH ? N - at : WIDTH), count);
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
