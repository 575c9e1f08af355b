// y = x W^T + b with weights of 8 bits, as quantised.h defines it. Included by level.cpp only.
//
// Panel p holds, for each group, the scales of outputs 16 p .. 16 p + 15, then the numbers of the first two or four
// inputs for the first output, for the second, and so on, then those of the next inputs. q8 is int8 with the numbers
// (to -128) and fp16 scales of a file.

#ifdef ALULA_DOT
#include "bytes_dot.h"
#else
#include "bytes_pairs.h"
#endif

// int8, or q8 with `Half` scales; see multiply_groups.
template <bool Half>
struct Bytes {
    using Rows = ByteProduct::Rows;
    static constexpr int64_t kBytes = kGroupBytes;
    static constexpr int64_t kRowBytes = ByteProduct::kRowBytes;

    static V scales(const char* w) {
        const uint16_t* at = reinterpret_cast<const uint16_t*>(w);
        return Half ? load_half(at) : load_packed(at);
    }

    // c[r][p] += chain over `groups` groups, for R rows and NP panels; c rows are `ldc` floats apart.
    template <int R, int NP>
    static void tile(Rows x, const char* w, int64_t panel, int64_t groups, float* c, int64_t ldc,
                     AheadGroups ahead) {
        for (int64_t g = 0; g < groups; ++g, w += kGroupBytes, ahead.at += ahead.step) {
            for (int64_t at = 0; at < ahead.bytes; at += 64) prefetch(ahead.at + at);
            I count[R][NP];
#pragma GCC unroll 4
            for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
                for (int p = 0; p < NP; ++p) count[r][p] = ByteProduct::start(x, r, g);
            ByteProduct::add_group<R, NP>(x, g, w + kScaleBytes, panel, count);
#pragma GCC unroll 4
            for (int p = 0; p < NP; ++p) {
                const V scale = scales(w + p * panel);
#pragma GCC unroll 4
                for (int r = 0; r < R; ++r) {
                    float* sum = c + r * ldc + 16 * p;
                    const V factor = mul(set1(ByteProduct::scale(x, r, g)), scale);
                    store(sum, fma(to_float(count[r][p]), factor, load(sum)));
                }
            }
        }
    }
};

inline void put_number(char* group, int64_t lane, int64_t i, int32_t number) {
    group[kScaleBytes + ByteProduct::place(lane, i)] = char(number + ByteProduct::kBias);
}

inline void pack_group(const PackArgs& a, int64_t panel, int64_t group, char* to) {
    uint16_t* scales = reinterpret_cast<uint16_t*>(to);
    for (int lane = 0; lane < 16; ++lane) {
        const int64_t output = panel * 16 + lane;
        int16_t numbers[kGroup] = {};
        float scale = 0.0f;
        if (output < a.out) {
            const void* row = row_at(const_cast<void*>(a.weight), a.bf16, output * a.in);
            scale = quantise_group(row, a.bf16, group * kGroup, a.in, true, numbers);
        }
        scales[packed_place(lane)] = to_bf16(scale);
        for (int64_t i = 0; i < kGroup; ++i) put_number(to, lane, i, numbers[i]);
    }
}

void pack_quantised(const PackArgs& a) {
    const int64_t panels = ceil_div(a.out, 16), groups = ceil_div(a.in, kGroup);
#pragma omp parallel for num_threads(a.threads)
    for (int64_t p = 0; p < panels; ++p)
        for (int64_t g = 0; g < groups; ++g)
            pack_group(a, p, g, static_cast<char*>(a.packed) + (p * groups + g) * kGroupBytes);
}

void pack_bytes(const BlockArgs& a) {
    const int64_t panels = ceil_div(a.out, 16), groups = a.in / kGroup;
#pragma omp parallel for num_threads(a.threads)
    for (int64_t p = 0; p < panels; ++p)
        for (int64_t g = 0; g < groups; ++g) {
            char* to = static_cast<char*>(a.packed) + (p * groups + g) * kGroupBytes;
            std::memset(to, 0, size_t(kGroupBytes));
            for (int64_t lane = 0; lane < smaller(16, a.out - 16 * p); ++lane) {
                const int64_t output = 16 * p + lane;
                const int8_t* numbers = static_cast<const int8_t*>(a.numbers) + output * a.in + g * kGroup;
                reinterpret_cast<uint16_t*>(to)[lane] = a.scales[output * groups + g];
                for (int64_t i = 0; i < kGroup; ++i) put_number(to, lane, i, numbers[i]);
            }
        }
}
