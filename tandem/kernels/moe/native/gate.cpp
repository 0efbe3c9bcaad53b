#include "gate.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <chrono>
#include <climits>
#include <ctime>

namespace tandem {
namespace {

std::int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

}  // namespace

void Gate::open() {
  value_.fetch_add(1, std::memory_order_seq_cst);
  // A waiter counts itself before it asks the kernel to sleep on the old value, so one of the two sees the other.
  if (sleepers_.load(std::memory_order_seq_cst) != 0)
    syscall(SYS_futex, reinterpret_cast<std::uint32_t*>(&value_), FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
}

void Gate::wait(std::uint32_t old, std::int64_t spin_ns, std::int64_t sleep_ns) {
  constexpr int kPausesPerClock = 64;
  if (value() != old) return;
  for (const std::int64_t end = now_ns() + spin_ns; spin_ns > 0 && now_ns() < end;)
    for (int i = 0; i < kPausesPerClock; i++) {
      if (value() != old) return;
      pause();
    }
  const timespec limit = {static_cast<time_t>(sleep_ns / 1000000000), static_cast<long>(sleep_ns % 1000000000)};
  const std::int64_t end = now_ns() + sleep_ns;
  sleepers_.fetch_add(1, std::memory_order_seq_cst);
  while (value_.load(std::memory_order_seq_cst) == old && (sleep_ns == 0 || now_ns() < end))
    syscall(SYS_futex, reinterpret_cast<std::uint32_t*>(&value_), FUTEX_WAIT_PRIVATE, old,
            sleep_ns == 0 ? nullptr : &limit, nullptr, 0);
  sleepers_.fetch_sub(1, std::memory_order_seq_cst);
}

}  // namespace tandem
