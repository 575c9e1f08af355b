// One dispatch level: this file is compiled once per level with ALULA_LEVEL naming it (see CMakeLists.txt).
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

#if defined(ALULA_LEVEL_AVX2) || defined(ALULA_LEVEL_AVX512)
#include <immintrin.h>
#endif

#include "kernels.h"

namespace alula {
namespace {
#include "vec.h"
#include "math.h"
#include "linear.h"
#include "quantised.h"
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

#if defined(ALULA_LEVEL_AVX512)
#define ALULA_TABLE table_avx512
#define ALULA_NAME "avx512"
#elif defined(ALULA_LEVEL_AVX2)
#define ALULA_TABLE table_avx2
#define ALULA_NAME "avx2"
#else
#define ALULA_TABLE table_portable
#define ALULA_NAME "portable"
#endif

const Table& ALULA_TABLE() {
    static constexpr Table table{ALULA_NAME, pack, pack_blocks, linear, norm, gated, rope,      attention,
                                 stack,      pair, softcap,     argmax, topk, logsumexp, softmax, perturb,
                                 choose};
    return table;
}

}  // namespace alula
