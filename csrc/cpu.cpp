#include "cpu.h"

#if defined(ALULA_AVXVNNI)
#include <cpuid.h>
#elif defined(ALULA_ARM64) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#elif defined(ALULA_ARM64) && defined(__APPLE__)
#include <sys/sysctl.h>
#endif

namespace alula {
namespace {

#if defined(ALULA_AVXVNNI)
// Asked of the CPU itself: not every compiler that knows the instructions knows their name.
bool has_avxvnni() {
    unsigned a = 0, b = 0, c = 0, d = 0;
    return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & (1u << 4));
}
#elif defined(ALULA_ARM64)
bool has_dotprod() {
#if defined(__linux__)
    return getauxval(AT_HWCAP) & HWCAP_ASIMDDP;
#elif defined(__APPLE__)
    int there = 0;
    size_t size = sizeof there;
    return sysctlbyname("hw.optional.arm.FEAT_DotProd", &there, &size, nullptr, 0) == 0 && there;
#else
    return false;
#endif
}
#endif

}  // namespace

std::vector<const Table*> supported_levels() {
    std::vector<const Table*> found;
#if defined(ALULA_X86)
    __builtin_cpu_init();
    const bool avx2 =
        __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    if (avx512 && __builtin_cpu_supports("avx512vnni")) found.push_back(&table_avx512vnni());
    if (avx512) found.push_back(&table_avx512());
#if defined(ALULA_AVXVNNI)
    if (avx2 && has_avxvnni()) found.push_back(&table_avxvnni());
#endif
    if (avx2) found.push_back(&table_avx2());
#elif defined(ALULA_ARM64)
    if (has_dotprod()) found.push_back(&table_dotprod());
#endif
    found.push_back(&table_portable());
    return found;
}

}  // namespace alula
