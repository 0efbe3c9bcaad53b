// Which kernels this CPU can run.
#pragma once

#include <string>
#include <vector>

#include "lookup.h"

namespace tandem {

// Slowest first; the scalar kernel always leads.
const std::vector<const Kernel*>& usable_kernels();

// By name; an empty name is the fastest. Null: unknown, or this CPU cannot run it.
const Kernel* kernel_named(const std::string& name);

}  // namespace tandem
