// How the threads of a parallel region share its work.

#pragma once

#include <omp.h>

#include <atomic>
#include <cstdint>

namespace {

// Where the threads of a region wait for its last one, who may have been interrupted: ready, not asleep, for as long as
// it can take others to have had their turn. The runtime's own wait comes after it, and between two steps, when somebody
// else can use the processor; so that one may be short (GOMP_SPINCOUNT) and this one may not.
class Meeting {
 public:
  void wait() {
    static const int processors = omp_get_num_procs();  // that this process may use
    const int all = omp_get_num_threads();
    if (all > processors) return;  // who is waited for may need this very one: the runtime's wait is then a short one
    here.fetch_add(1);
    for (int i = 0; i < TURNS && here.load() < all; ++i) pause();
  }

 private:
  static constexpr int TURNS = 300000;  // of 10 to 30 ns: as many as the runtime's own wait has by default
  std::atomic<int> here{0};

  static void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
  }
};

// One thread's part of the jobs [0, count): ``run`` neighbours at a time, by whichever thread is free.
//     for (Turn turn(taken, count, run); turn.job < count; turn.advance())
// ``next`` is what this thread does afterwards (count or more: nothing), so it can be fetched from memory meanwhile.
struct Turn {
  std::atomic<int64_t>& taken;
  const int64_t count, run;
  int64_t job, end, after, next;
  Turn(std::atomic<int64_t>& taken, int64_t count, int64_t run) : taken(taken), count(count), run(run) {
    after = taken.fetch_add(run);
    take();
  }
  void advance() {
    if (next == after) take();
    else job = next++;
    if (next == end) next = after;
  }

 private:
  void take() {
    job = after;
    after = taken.fetch_add(run);
    end = job + run < count ? job + run : count;
    next = job + 1 < end ? job + 1 : after;
  }
};

}  // namespace
