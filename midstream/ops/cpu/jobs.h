// How the threads of a parallel region share its work.

#pragma once

#include <atomic>
#include <cstdint>

namespace {

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
