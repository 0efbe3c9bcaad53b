// Waiting for a word in memory to change: spin for a while, then sleep in the kernel.
#pragma once

#include <atomic>
#include <cstdint>

namespace tandem {

class Gate {
 public:
  std::uint32_t value() const { return value_.load(std::memory_order_acquire); }

  // Changes the value and wakes every waiter.
  void open();

  // Returns when the value is no longer `old`, or after `sleep_ns` of sleep (0: no limit), which counts from the end of
  // the spinning. `spin_ns` 0 does not spin.
  void wait(std::uint32_t old, std::int64_t spin_ns, std::int64_t sleep_ns = 0);

 private:
  alignas(64) std::atomic<std::uint32_t> value_{0};
  std::atomic<std::uint32_t> sleepers_{0};
};

}  // namespace tandem
