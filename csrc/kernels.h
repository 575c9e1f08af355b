// What each dispatch level offers. Plain pointers and sizes only: no torch, no Python.
//
// Every level is the same source compiled with other flags (level.cpp), over 16 logical fp32 lanes and explicit
// fused multiply-adds in a fixed order, so all levels give the same bits. Work is split over threads only by
// rows, heads or outputs, never inside a sum, so the thread count does not change the bits either.
#pragma once

#include <cstdint>

namespace alula {

// Rows of fp32 or bf16 values; stride in elements.
struct Rows {
    const void* data;
    int64_t stride;
    bool bf16;
};

// How a packed weight is stored: linear.h, bytes.h for int8 and q8, nibbles.h for q4. q8 and q4 hold what GGUF
// files do: q8 is int8 with fp16 scales (Q8_0), q4 has fp16 scales and an fp16 least value (Q4_0, Q4_1).
enum class Format { fp32, bf16, int8, q8, q4 };

// Inputs that share a scale, and the bytes of one such group of 16 outputs.
constexpr int64_t kGroup = 32;
constexpr int64_t kGroupBytes = 16 * (2 + kGroup);
constexpr int64_t kNibbleBytes = 16 * (4 + kGroup / 2);

struct LinearArgs {
    Rows x;
    const void* weight;  // packed panels
    Format format;
    const float* bias;  // or null
    void* y;            // contiguous
    bool y_bf16;
    int64_t rows, in, out;
    int threads;
};

struct PackArgs {
    const void* weight;  // [out, in], contiguous
    bool bf16;
    Format format;  // of the result: that of the weight, or int8
    void* packed;
    int64_t in, out;
    int threads;
};

// A weight that is quantised already: value = scale * number (+ least).
struct BlockArgs {
    const void* numbers;            // [out, in]: int8 for q8, bytes of 0 to 15 for q4
    const uint16_t *scales, *least; // fp16, [out, groups]; least for q4 only
    Format format;
    void* packed;
    int64_t in, out;  // in: a multiple of kGroup
    int threads;
};

struct NormArgs {
    Rows x;
    const Rows* residual;  // or null
    Rows weight;           // one row
    void* y;               // contiguous, dtype of x
    void* sum;             // contiguous, dtype of x; only with a residual
    int64_t rows, width;
    float eps;
    bool round_last;
    int threads;
};

struct GatedArgs {
    Rows x;  // gates, then ups
    void* y;
    int64_t rows, width;  // width of the result
    bool gelu;
    int threads;
};

struct RopeArgs {
    Rows qkv;
    void* q;  // [rows, heads, head_dim], dtype of qkv
    void *keys, *values;  // [groups, held, head_dim]: the slots of a head lie side by side
    bool kv_bf16;
    int64_t held;
    const float *cos, *sin;
    const int64_t *positions, *slots;
    const Rows *query_norm, *key_norm;  // or null, both
    float eps;
    bool round_last;
    int64_t rows, heads, groups, head_dim;
    int threads;
};

// One run of consecutive rows of the same sequence. Logical key j < shared keys lies in slots[j].
struct Run {
    int64_t begin, end;
    const int32_t* slots;
};

struct AttentionArgs {
    const void* q;
    void* y;
    bool bf16;
    const void *keys, *values;  // as in RopeArgs
    bool kv_bf16;
    int64_t held;
    const Run* runs;
    int64_t run_count;
    const int32_t *count, *first, *shared;  // per row: keys, first visible key, keys found through the run's slots
    const int32_t *prefix, *tail;           // per row: logical number of the tail's first key; tail slots
    int64_t tail_width;
    int64_t rows, heads, groups, head_dim, window;
    float scale, softcap;
    int threads;
};

// One decoder layer. Norm weights lie in one dtype; those that a family does not have are null.
struct StackLayer {
    LinearArgs qkv, output, gate_up, down;
    const void *input_norm, *output_norm, *mlp_norm, *mlp_output_norm;
    const void *query_norm, *key_norm;
    bool head_norm_bf16;
    float head_eps;
    bool head_round_last;
    const float *cos, *sin;
    int64_t window;
};

constexpr int64_t kFinalTap = -1;

struct StackArgs {
    const StackLayer* layers;
    int64_t layer_count;
    const void* final_norm;  // null: none (pairs only)
    bool norm_bf16;
    void* residual;  // [rows, hidden]: the embedded tokens at first, then what every layer leaves
    void* final;     // [rows, hidden], after the final norm
    bool bf16;       // of all rows
    void* const *keys, *const *values;  // per layer
    bool kv_bf16;
    int64_t held;  // slots of every layer
    const int64_t *positions, *slots;
    AttentionArgs where;  // all but q, y, keys, values and window
    const int64_t* taps;  // how many layers have run before the rows wanted, or kFinalTap
    int64_t tap_count;
    void* features;  // [rows, tap_count, hidden]
    int64_t rows, hidden, middle, heads, groups, head_dim;
    float eps;
    bool round_last, gelu;
    int threads;
};

// One layer whose rows are pairs of a token and a state.
struct PairArgs {
    StackArgs stack;        // its single layer; rows: all of them; where: of the kept rows; final: the kept rows' result
    const int64_t* tokens;  // per row
    const void* embedding;  // [vocabulary, hidden]
    const void* states;     // [rows, hidden]
    const void* state_norm;
    const int64_t* keep;  // numbers of the kept rows, or null for all
    int64_t kept;
    bool normed_residual;  // the layer's residual is the normed state
};

struct VocabularyArgs {
    const float* x;
    int64_t stride, rows, width;
    int threads;
};

// Rows that get the noise of ids, see noise.h. Temperature 0: none.
struct NoiseArgs {
    float* x;  // [rows, width]
    int64_t rows, width;
    const float* temperature;
    const uint64_t* key;  // per row
    const int64_t* ids;   // per column
    float scale;
    int threads;
};

// How each row is to be chosen from, see cuts.h. Temperature 0: greedily; top_k 0, top_p 1 and min_p 0: no such cut.
struct ChoiceArgs {
    VocabularyArgs rows;
    const double* temperature;
    const int64_t* top_k;
    const double *top_p, *min_p;
    const uint64_t* key;  // of the noise
};

struct Table {
    const char* name;
    void (*pack)(const PackArgs&);
    void (*pack_blocks)(const BlockArgs&);
    void (*linear)(const LinearArgs&);
    void (*norm)(const NormArgs&);
    void (*gated)(const GatedArgs&);
    void (*rope)(const RopeArgs&);
    void (*attention)(const AttentionArgs&);
    void (*stack)(const StackArgs&);
    void (*pair)(const PairArgs&);
    void (*softcap)(const Rows& x, void* y, int64_t rows, int64_t width, float cap, int threads);
    void (*argmax)(const VocabularyArgs&, int64_t* index);
    void (*topk)(const VocabularyArgs&, int64_t k, float* values, int64_t* index);
    void (*logsumexp)(const VocabularyArgs&, float* y);
    void (*softmax)(const VocabularyArgs&, float* y, bool logarithm);
    void (*perturb)(const NoiseArgs&);
    void (*choose)(const ChoiceArgs&, int64_t* index);
};

const Table& table_portable();
#if defined(ALULA_X86)
const Table& table_avx2();
const Table& table_avx512();
const Table& table_avx512vnni();
#if defined(ALULA_AVXVNNI)
const Table& table_avxvnni();
#endif
#elif defined(ALULA_ARM64)
const Table& table_dotprod();
#endif

}  // namespace alula
