// y = x W^T + b in whole numbers: rounding to groups, and how products of groups are shared out. Included by level.cpp
// only.
//
// int8: weight and rows are cut into groups of kGroup inputs, the last one filled up with zeros. A group is stored as whole
// numbers of -127 to 127 and one scale: the largest magnitude over 127 (in bf16 for weights, before it is divided by; in
// fp32 for rows). The products of a group add up exactly in int32, in whatever order. A result is one chain of fused
// multiply-adds over the groups 0, 1, 2, ... of sum * (row scale * weight scale, rounded), then the bias, then one
// rounding. A group with NaN or infinity has the scale NaN, so all results of such a row (or output) are NaN.
//
// Formats: bytes.h for int8 and q8, nibbles.h for q4.

constexpr int kCountRows = 4;  // rows of a tile: with more, counts do not fit AVX2's registers
constexpr int64_t kBlockGroups = kInputBlock / kGroup, kScaleBytes = 16 * sizeof(uint16_t);
constexpr float kLeastLargest = 0x1p-100f;  // groups of smaller values are zeros: their scales would lose bits

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

// Memory to fetch ahead: `bytes` for every group.
struct AheadGroups {
    const char* at;
    int64_t step, bytes;
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
