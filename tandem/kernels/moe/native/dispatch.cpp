#include "dispatch.h"

namespace tandem {
namespace {

std::vector<const Kernel*> find_kernels() {
  std::vector<const Kernel*> kernels = {&kScalar};
#if defined(__x86_64__)
  // The compilers' own run-time checks: cpuid and, by XGETBV, what the operating system saves.
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
    kernels.push_back(&kAvx2);
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512dq")) {
      kernels.push_back(&kAvx512);
      if (__builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512vnni")) kernels.push_back(&kVbmi);
    }
  }
#endif
  return kernels;
}

}  // namespace

const std::vector<const Kernel*>& usable_kernels() {
  static const std::vector<const Kernel*> kernels = find_kernels();
  return kernels;
}

const Kernel* kernel_named(const std::string& name) {
  const auto& kernels = usable_kernels();
  if (name.empty()) return kernels.back();
  for (const Kernel* kernel : kernels)
    if (name == kernel->name) return kernel;
  return nullptr;
}

}  // namespace tandem
