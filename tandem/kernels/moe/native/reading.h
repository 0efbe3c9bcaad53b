// What a kernel's rate is measured against: how fast a pool's threads can read memory, and a core's clock.
#pragma once

#include <cstdint>

#include "pool.h"

namespace tandem {

// Seconds to read `bytes` at `data` once, each thread a contiguous part. Ways: 0 one stream of vector loads, 1 the same
// with a prefetch ahead, 2 four streams at a time.
double read_seconds(Pool& pool, const std::uint8_t* data, std::int64_t bytes, int way);

// Cycles a nanosecond of the calling thread's core, from a chain of multiplications: the most of several short runs.
double core_ghz();

}  // namespace tandem
