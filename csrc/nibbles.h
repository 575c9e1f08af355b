// y = x W^T + b with weights of 4 bits, in the groups of 32 inputs of GGUF's Q4_0 and Q4_1. Included by level.cpp only.
//
// A weight is scale * number + least, with numbers of 0 to 15. Rows are quantised as in quantised.h, and keep beside
// the scale of a group its offset: scale * sum of the numbers, rounded once. A result is one chain of fused
// multiply-adds over the groups 0, 1, 2, ...: sum of products * (row scale * weight scale, rounded), then offset *
// least; then the bias, then one rounding.
//
// Panel p holds, for each group, the scales of outputs 16 p .. 16 p + 15, their least values, then for every four
// inputs those of outputs 0 to 7 in the low halves of 32 bytes and those of outputs 8 to 15 in the high halves.

// Rows in int8, each padded to whole groups: scales, offsets and numbers. stride: bytes from row to row.
struct ByteRows {
    const char *scales, *offsets, *numbers;
    int64_t stride;
    ByteRows from(int64_t row, int64_t group) const {
        const int64_t by = row * stride;
        return {scales + by + 4 * group, offsets + by + 4 * group, numbers + by + group * kGroup, stride};
    }
    float scale(int64_t row, int64_t group) const { return value(scales, row, group); }
    float offset(int64_t row, int64_t group) const { return value(offsets, row, group); }

   private:
    float value(const char* from, int64_t row, int64_t group) const {
        return reinterpret_cast<const float*>(from + row * stride)[group];
    }
};

inline int64_t byte_stride(int64_t in) { return ceil_div(ceil_div(in, kGroup) * (8 + kGroup), 64) * 64 + 64; }

inline ByteRows byte_rows(const LinearArgs& a, const float* wide) {
    const char* at = reinterpret_cast<const char*>(wide);
    const int64_t groups = ceil_div(a.in, kGroup);
    return {at, at + 4 * groups, at + 8 * groups, byte_stride(a.in)};
}

inline void bytes_row(const LinearArgs& a, int64_t r, float* wide) {
    const int64_t groups = ceil_div(a.in, kGroup);
    float* scales = reinterpret_cast<float*>(reinterpret_cast<char*>(wide) + r * byte_stride(a.in));
    int8_t* to = reinterpret_cast<int8_t*>(scales + 2 * groups);
    for (int64_t g = 0; g < groups; ++g) {
        int16_t numbers[kGroup];
        int32_t total = 0;
        scales[g] = quantise_group(row_at(a.x, r), a.x.bf16, g * kGroup, a.in, false, numbers);
        for (int64_t i = 0; i < kGroup; ++i) {
            total += numbers[i];
            to[g * kGroup + i] = int8_t(numbers[i]);
        }
        scales[groups + g] = scales[g] * float(total);
    }
}

// Four inputs: sums of R rows and NP panels.
template <int R, int NP>
inline void add_quad(const char* x, int64_t ldx, const uint8_t* w, int64_t panel, S (&sum)[R][NP]) {
    Q weight[NP];
#pragma GCC unroll 4
    for (int p = 0; p < NP; ++p) weight[p] = load_nibbles(w + p * panel);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
        int32_t quad;
        std::memcpy(&quad, x + r * ldx, sizeof quad);
        const Q value = set_quads(quad);
#pragma GCC unroll 4
        for (int p = 0; p < NP; ++p) sum[r][p] = add_quads(weight[p], value, sum[r][p]);
    }
}

// See multiply_groups.
struct Nibbles {
    using Rows = ByteRows;
    static constexpr int64_t kBytes = kNibbleBytes;
    static constexpr int64_t kRowBytes = 8 + kGroup;

    template <int R, int NP>
    static void tile(ByteRows x, const char* w, int64_t panel, int64_t groups, float* c, int64_t ldc,
                     AheadGroups ahead) {
        for (int64_t g = 0; g < groups; ++g, w += kNibbleBytes, ahead.at += ahead.step) {
            for (int64_t at = 0; at < ahead.bytes; at += 64) prefetch(ahead.at + at);
            S sum[R][NP];
#pragma GCC unroll 4
            for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
                for (int p = 0; p < NP; ++p) sum[r][p] = no_counts();
            const uint8_t* weights = reinterpret_cast<const uint8_t*>(w) + 2 * kScaleBytes;
#pragma GCC unroll 8
            for (int64_t i = 0; i < kGroup; i += 4)
                add_quad<R, NP>(x.numbers + g * kGroup + i, x.stride, weights + 8 * i, panel, sum);
#pragma GCC unroll 4
            for (int p = 0; p < NP; ++p) {
                const uint16_t* halves = reinterpret_cast<const uint16_t*>(w + p * panel);
                const V scale = load_half(halves), least = load_half(halves + 16);
#pragma GCC unroll 4
                for (int r = 0; r < R; ++r) {
                    float* total = c + r * ldc + 16 * p;
                    const V factor = mul(set1(x.scale(r, g)), scale);
                    const V counted = fma(to_float(to_counts(sum[r][p])), factor, load(total));
                    store(total, fma(set1(x.offset(r, g)), least, counted));
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
