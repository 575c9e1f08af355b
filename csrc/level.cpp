// One dispatch level: this file is compiled once per level, with ALULA_LEVEL naming it and ALULA_VEC its registers (see
// CMakeLists.txt).
//
// Everything but the table lies in an unnamed namespace and nothing of the C++ library is instantiated here: a
// function with external linkage could be picked by the linker for all levels and crash an older CPU.

#include <math.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>

#ifdef _OPENMP
#include <omp.h>
#else
static inline int omp_get_thread_num() { return 0; }
static inline int omp_get_num_threads() { return 1; }
#endif

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "kernels.h"

namespace alula {
namespace {
#include "vec.h"
#include "math.h"
#include "linear.h"
#include "quantised.h"
#include "byte_rows.h"
#include "bytes.h"
#include "nibbles.h"
#include "product.h"
#include "panels.h"
#include "attention.h"
#include "rows.h"
#include "stack.h"
#include "pair.h"
#include "vocabulary.h"
#include "noise.h"
#include "cuts.h"
}  // namespace

#define ALULA_TEXT(x) #x
#define ALULA_NAME(level) ALULA_TEXT(level)
#define ALULA_JOIN(a, b) a##b
#define ALULA_TABLE(level) ALULA_JOIN(table_, level)

const Table& ALULA_TABLE(ALULA_LEVEL)() {
    static constexpr Table table{ALULA_NAME(ALULA_LEVEL), pack, pack_blocks, linear, norm, gated, rope, attention,
                                 stack, pair, softcap, argmax, topk, logsumexp, softmax, perturb, choose};
    return table;
}

}  // namespace alula
