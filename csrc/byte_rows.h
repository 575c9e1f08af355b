// Rows in int8 whose numbers are multiplied four by four. Included by level.cpp only.

// Rows in int8, each padded to whole groups: scales, a second value of each group, and numbers. stride: bytes from row
// to row.
struct ByteRows {
    const char *scales, *seconds, *numbers;
    int64_t stride;
    ByteRows from(int64_t row, int64_t group) const {
        const int64_t by = row * stride;
        return {scales + by + 4 * group, seconds + by + 4 * group, numbers + by + group * kGroup, stride};
    }
    float scale(int64_t row, int64_t group) const { return value<float>(scales, row, group); }
    template <class T>
    T second(int64_t row, int64_t group) const {
        return value<T>(seconds, row, group);
    }

   private:
    template <class T>
    T value(const char* from, int64_t row, int64_t group) const {
        T found;
        std::memcpy(&found, from + row * stride + 4 * group, sizeof found);
        return found;
    }
};

inline int64_t byte_stride(int64_t in) { return ceil_div(ceil_div(in, kGroup) * (8 + kGroup), 64) * 64 + 64; }

inline ByteRows byte_rows(const LinearArgs& a, const float* wide) {
    const char* at = reinterpret_cast<const char*>(wide);
    const int64_t groups = ceil_div(a.in, kGroup);
    return {at, at + 4 * groups, at + 8 * groups, byte_stride(a.in)};
}

// second(scale, total) makes the second value of a group, from its scale and the sum of its numbers.
template <class Second>
inline void bytes_row(const LinearArgs& a, int64_t r, float* wide, Second second) {
    const int64_t groups = ceil_div(a.in, kGroup);
    char* scales = reinterpret_cast<char*>(wide) + r * byte_stride(a.in);
    char *seconds = scales + 4 * groups, *to = scales + 8 * groups;
    for (int64_t g = 0; g < groups; ++g) {
        int16_t numbers[kGroup];
        int32_t total = 0;
        const float scale = quantise_group(row_at(a.x, r), a.x.bf16, g * kGroup, a.in, false, numbers);
        for (int64_t i = 0; i < kGroup; ++i) {
            total += numbers[i];
            to[g * kGroup + i] = char(numbers[i]);
        }
        const auto other = second(scale, total);
        static_assert(sizeof other == 4, "as large as a scale");
        std::memcpy(scales + 4 * g, &scale, 4);
        std::memcpy(seconds + 4 * g, &other, 4);
    }
}

// Four inputs: sums of R rows and NP panels, whose weights Load reads.
template <int R, int NP, Q (*Load)(const uint8_t*)>
inline void add_quad(const char* x, int64_t ldx, const uint8_t* w, int64_t panel, S (&sum)[R][NP]) {
    Q weight[NP];
#pragma GCC unroll 4
    for (int p = 0; p < NP; ++p) weight[p] = Load(w + p * panel);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
        int32_t quad;
        std::memcpy(&quad, x + r * ldx, sizeof quad);
        const Q value = set_quads(quad);
#pragma GCC unroll 4
        for (int p = 0; p < NP; ++p) sum[r][p] = add_quads(weight[p], value, sum[r][p]);
    }
}
