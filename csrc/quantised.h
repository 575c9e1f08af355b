// y = x W^T + b in whole numbers. Included by level.cpp only.
//
// int8: weight and rows are cut into groups of kGroup inputs, the last one filled up with zeros. A group is stored as whole
// numbers of -127 to 127 and one scale: the largest magnitude over 127 (in bf16 for weights, before it is divided by; in
// fp32 for rows). The products of a group add up exactly in int32, in whatever order. A result is one chain of fused
// multiply-adds over the groups 0, 1, 2, ... of sum * (row scale * weight scale, rounded), then the bias, then one
// rounding. A group with NaN or infinity has the scale NaN, so all results of such a row (or output) are NaN.
//
// Panel p holds, for each group, the scales of outputs 16 p .. 16 p + 15, then pair by pair of inputs both weights of
// the first output, of the second, and so on. q8 is the same with the numbers (to -128) and fp16 scales of a file.

constexpr int kCountRows = 4;  // rows of a tile: with more, counts do not fit AVX2's registers
constexpr int64_t kBlockGroups = kInputBlock / kGroup, kScaleBytes = 16 * sizeof(uint16_t);
constexpr float kLeastLargest = 0x1p-100f;  // groups of smaller values are zeros: their scales would lose bits

// Rows in int8, each padded to whole groups: scales, and numbers widened to int16. Strides differ by the type only.
struct QuantisedRows {
    const float* scales;
    const int16_t* numbers;
    int64_t stride;  // in floats
    QuantisedRows from(int64_t row, int64_t group) const {
        return {scales + row * stride + group, numbers + 2 * row * stride + group * kGroup, stride};
    }
};

inline V magnitude(V a) { return where_less(absolute(a), set1(kInfinity), absolute(a), set1(kInfinity)); }

// Numbers of the group that starts at value `at` of a row, and its scale.
inline float quantise_group(const void* row, bool bf16, int64_t at, int64_t width, bool bf16_scale, int16_t* numbers) {
    V value[kGroup / 16], top = zero();
    for (int i = 0; i < kGroup / 16; ++i) {
        value[i] = row_load(row, bf16, at + 16 * i, width);
        top = maximum(magnitude(value[i]), top);
    }
    const float largest = lane_max(top);
    if (!(largest >= kLeastLargest && largest < kInfinity)) {
        std::memset(numbers, 0, sizeof(int16_t) * kGroup);
        return largest < kInfinity ? 0.0f : bits_to_float(0x7fc00000u);
    }
    float scale = largest / 127.0f;
    if (bf16_scale) scale = from_bf16(to_bf16(scale));
    const V inverse = set1(1.0f / scale), shift = set1(0x1.8p23f);  // the sum's low bits are the nearest whole number
    for (int i = 0; i < kGroup / 16; ++i) store_low_halves(numbers + 16 * i, add(mul(value[i], inverse), shift));
    return scale;
}

// In the place of widened rows, which is larger. `wide` has widened_stride(in) floats a row.
inline QuantisedRows quantised_rows(const LinearArgs& a, float* wide) {
    const int64_t groups = ceil_div(a.in, kGroup);
    return {wide, reinterpret_cast<int16_t*>(wide + groups), widened_stride(a.in)};
}

inline void quantise_row(const LinearArgs& a, int64_t r, float* wide) {
    const int64_t groups = ceil_div(a.in, kGroup);
    float* scales = wide + r * widened_stride(a.in);
    int16_t* numbers = reinterpret_cast<int16_t*>(scales + groups);
    for (int64_t g = 0; g < groups; ++g)
        scales[g] = quantise_group(row_at(a.x, r), a.x.bf16, g * kGroup, a.in, false, numbers + g * kGroup);
}

// Memory to fetch ahead: `bytes` for every group.
struct AheadGroups {
    const char* at;
    int64_t step, bytes;
};

// One pair of inputs: counts of R rows and NP panels.
template <int R, int NP>
inline void add_pair(const int16_t* x, int64_t ldx, const int8_t* w, int64_t panel, I (&count)[R][NP]) {
    P weight[NP];
#pragma GCC unroll 4
    for (int p = 0; p < NP; ++p) weight[p] = load_pairs(w + p * panel);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
        int32_t pair;
        std::memcpy(&pair, x + r * ldx, sizeof pair);
        const P value = set_pairs(pair);
#pragma GCC unroll 4
        for (int p = 0; p < NP; ++p) count[r][p] = add_products(value, weight[p], count[r][p]);
    }
}

// int8, or q8 with `Half` scales; see multiply_groups.
template <bool Half>
struct Bytes {
    using Rows = QuantisedRows;
    static constexpr int64_t kBytes = kGroupBytes;
    static constexpr int64_t kRowBytes = 4 + 2 * kGroup;

    static V scales(const char* w) {
        const uint16_t* at = reinterpret_cast<const uint16_t*>(w);
        return Half ? load_half(at) : load_packed(at);
    }

    // c[r][p] += chain over `groups` groups, for R rows and NP panels; c rows are `ldc` floats apart.
    template <int R, int NP>
    static void tile(QuantisedRows x, const char* w, int64_t panel, int64_t groups, float* c, int64_t ldc,
                     AheadGroups ahead) {
        for (int64_t g = 0; g < groups; ++g, w += kGroupBytes, ahead.at += ahead.step) {
            for (int64_t at = 0; at < ahead.bytes; at += 64) prefetch(ahead.at + at);
            I count[R][NP];
#pragma GCC unroll 4
            for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
                for (int p = 0; p < NP; ++p) count[r][p] = no_counts();
            const int8_t* weights = reinterpret_cast<const int8_t*>(w) + kScaleBytes;
#pragma GCC unroll 4
            for (int64_t i = 0; i < kGroup; i += 2)
                add_pair<R, NP>(x.numbers + g * kGroup + i, 2 * x.stride, weights + 16 * i, panel, count);
#pragma GCC unroll 4
            for (int p = 0; p < NP; ++p) {
                const V scale = scales(w + p * panel);
#pragma GCC unroll 4
                for (int r = 0; r < R; ++r) {
                    float* sum = c + r * ldc + 16 * p;
                    const V factor = mul(set1(x.scales[r * x.stride + g]), scale);
                    store(sum, fma(to_float(count[r][p]), factor, load(sum)));
                }
            }
        }
    }
};

template <class F>
using GroupTile = void (*)(typename F::Rows, const char*, int64_t, int64_t, float*, int64_t, AheadGroups);

template <class F>
GroupTile<F> group_tile(int rows, bool wide) {
    static constexpr GroupTile<F> single[kCountRows] = {F::template tile<1, 1>, F::template tile<2, 1>,
                                                        F::template tile<3, 1>, F::template tile<4, 1>};
    static constexpr GroupTile<F> many[kCountRows] = {
        F::template tile<1, panels_for(1)>, F::template tile<2, panels_for(2)>, F::template tile<3, panels_for(3)>,
        F::template tile<4, panels_for(4)>};
    return wide ? many[rows - 1] : single[rows - 1];
}

// One block of rows times `panels` neighbouring panels. Each tile of rows fetches its part of the panels that follow.
template <class F>
void multiply_group_block(const LinearArgs& a, const typename F::Rows& x, int64_t row, int64_t rows, int64_t panel,
                          int64_t panels, float* c) {
    const int64_t ldc = panels * 16, groups = ceil_div(a.in, kGroup), stride = groups * F::kBytes;
    const int64_t tiles = ceil_div(rows, kCountRows), blocks = tiles > 1 ? ceil_div(groups, kBlockGroups) : 1;
    const int64_t step = panels * F::kBytes, share = ceil_div(step, tiles);
    const char* w = static_cast<const char*>(a.weight) + panel * stride;
    std::memset(c, 0, sizeof(float) * size_t(rows * ldc));
    for (int64_t block = 0; block < blocks; ++block) {
        const int64_t begin = groups * block / blocks, end = groups * (block + 1) / blocks;
        for (int64_t t = 0; t < tiles; ++t) {
            const int64_t low = rows * t / tiles, high = rows * (t + 1) / tiles;
            const AheadGroups ahead{w + panels * stride + begin * step + t * share, step, share};
            group_tile<F>(int(high - low), panels > 1)(x.from(row + low, begin), w + begin * F::kBytes, stride,
                                                       end - begin, c + low * ldc, ldc, ahead);
        }
    }
    finish(a, c, ldc, row, rows, panel, panels);
}

// F says how rows and a group of the weight are stored: Rows, kRowBytes (of a group of a row), kBytes and tile.
template <class F>
void multiply_groups(const LinearArgs& a, const typename F::Rows& x) {
    share_outputs<kCountRows>(a, ceil_div(a.in, kGroup) * F::kRowBytes,
                              [&](int64_t row, int64_t rows, int64_t panel, int64_t panels, float* sums) {
                                  multiply_group_block<F>(a, x, row, rows, panel, panels, sums);
                              });
}

// Place of a number among those of its group: its output's lane, and its input.
inline int64_t pair_place(int64_t lane, int64_t i) { return 16 * (i - i % 2) + 2 * lane + i % 2; }

inline void pack_group(const PackArgs& a, int64_t panel, int64_t group, char* to) {
    uint16_t* scales = reinterpret_cast<uint16_t*>(to);
    int8_t* weights = reinterpret_cast<int8_t*>(to) + kScaleBytes;
    for (int lane = 0; lane < 16; ++lane) {
        const int64_t output = panel * 16 + lane;
        int16_t numbers[kGroup] = {};
        float scale = 0.0f;
        if (output < a.out) {
            const void* row = row_at(const_cast<void*>(a.weight), a.bf16, output * a.in);
            scale = quantise_group(row, a.bf16, group * kGroup, a.in, true, numbers);
        }
        scales[packed_place(lane)] = to_bf16(scale);
        for (int64_t i = 0; i < kGroup; ++i) weights[pair_place(lane, i)] = int8_t(numbers[i]);
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
                for (int64_t i = 0; i < kGroup; ++i) to[kScaleBytes + pair_place(lane, i)] = char(numbers[i]);
            }
        }
}
