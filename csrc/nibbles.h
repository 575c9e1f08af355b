// y = x W^T + b with weights of 4 bits, in the groups of 32 inputs of GGUF's Q4_0 and Q4_1. Included by level.cpp only.
//
// A weight is scale * number + least, with numbers of 0 to 15. Rows are quantised as in quantised.h, and keep beside
// the scale of a group its offset: scale * sum of the numbers, rounded once. A result is one chain of fused
// multiply-adds over the groups 0, 1, 2, ...: sum of products * (row scale * weight scale, rounded), then offset *
// least; then the bias, then one rounding.
//
// Panel p holds, for each group, the scales of outputs 16 p .. 16 p + 15, their least values, then for every four
// inputs those of outputs 0 to 7 in the low halves of 32 bytes and those of outputs 8 to 15 in the high halves.

// See multiply_groups.
struct Nibbles {
    using Rows = ByteRows;
    static constexpr int64_t kBytes = kNibbleBytes;
    static constexpr int64_t kRowBytes = 8 + kGroup;

    // Beside the scale of a row's group: its offset.
    static void prepare(const LinearArgs& a, int64_t r, float* wide) {
        bytes_row(a, r, wide, [](float scale, int32_t total) { return scale * float(total); });
    }

    template <int R, int NP>
    static void tile(ByteRows x, const char* w, int64_t panel, int64_t groups, float* c, int64_t ldc,
                     AheadGroups ahead) {
        for (int64_t g = 0; g < groups; ++g, w += kNibbleBytes, ahead.at += ahead.step) {
            for (int64_t at = 0; at < ahead.bytes; at += 64) prefetch(ahead.at + at);
            S sum[R][NP];
#pragma GCC unroll 4
            for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
                for (int p = 0; p < NP; ++p) sum[r][p] = set_counts(0);
            const uint8_t* weights = reinterpret_cast<const uint8_t*>(w) + 2 * kScaleBytes;
#pragma GCC unroll 8
            for (int64_t i = 0; i < kGroup; i += 4)
                add_quad<R, NP, load_nibbles>(x.numbers + g * kGroup + i, x.stride, weights + 8 * i, panel, sum);
#pragma GCC unroll 4
            for (int p = 0; p < NP; ++p) {
                const uint16_t* halves = reinterpret_cast<const uint16_t*>(w + p * panel);
                const V scale = load_half(halves), least = load_half(halves + 16);
#pragma GCC unroll 4
                for (int r = 0; r < R; ++r) {
                    float* total = c + r * ldc + 16 * p;
                    const V factor = mul(set1(x.scale(r, g)), scale);
                    const V counted = fma(to_float(to_counts(sum[r][p])), factor, load(total));
                    store(total, fma(set1(x.second<float>(r, g)), least, counted));
                }
            }
        }
    }
};

// Puts a number into its half of the byte that output lane and input i share with another output.
inline void put_nibble(uint8_t* weights, int64_t lane, int64_t i, uint8_t number) {
    weights[8 * (i - i % 4) + 4 * (lane % 8) + i % 4] |= uint8_t(lane < 8 ? number : number << 4);
}

void pack_nibbles(const BlockArgs& a) {
    const int64_t panels = ceil_div(a.out, 16), groups = a.in / kGroup;
#pragma omp parallel for num_threads(a.threads)
    for (int64_t p = 0; p < panels; ++p)
        for (int64_t g = 0; g < groups; ++g) {
            char* to = static_cast<char*>(a.packed) + (p * groups + g) * kNibbleBytes;
            std::memset(to, 0, size_t(kNibbleBytes));
            uint16_t* halves = reinterpret_cast<uint16_t*>(to);
            for (int64_t lane = 0; lane < smaller(16, a.out - 16 * p); ++lane) {
                const int64_t output = 16 * p + lane;
                const uint8_t* numbers = static_cast<const uint8_t*>(a.numbers) + output * a.in + g * kGroup;
                halves[lane] = a.scales[output * groups + g];
                halves[16 + lane] = a.least[output * groups + g];
                for (int64_t i = 0; i < kGroup; ++i)
                    put_nibble(reinterpret_cast<uint8_t*>(to) + 2 * kScaleBytes, lane, i, numbers[i]);
            }
        }
}
