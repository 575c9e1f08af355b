// int8 by fours: an instruction multiplies and adds four bytes. See bytes.h.
//
// Where it takes the weights without a sign (kByteBias 128) they are stored with the bias added, and a count starts at
// -kByteBias times the sum of the row's numbers: the same whole number in the end.

// How Bytes multiplies.
struct ByteProduct {
    using Rows = ByteRows;
    static constexpr int64_t kRowBytes = 8 + kGroup;
    static constexpr int32_t kBias = kByteBias;

    static Rows rows(const LinearArgs& a, float* wide) { return byte_rows(a, wide); }
    static void prepare(const LinearArgs& a, int64_t r, float* wide) {
        bytes_row(a, r, wide, [](float, int32_t total) { return -kByteBias * total; });
    }
    static float scale(const Rows& x, int64_t row, int64_t group) { return x.scale(row, group); }
    static I start(const Rows& x, int64_t row, int64_t group) { return set_counts(x.second<int32_t>(row, group)); }

    // Place of a number among those of its group: its output's lane, and its input.
    static int64_t place(int64_t lane, int64_t i) { return 16 * (i - i % 4) + 4 * lane + i % 4; }

    template <int R, int NP>
    static void add_group(const Rows& x, int64_t group, const char* w, int64_t panel, I (&count)[R][NP]) {
        const uint8_t* weights = reinterpret_cast<const uint8_t*>(w);
#pragma GCC unroll 8
        for (int64_t i = 0; i < kGroup; i += 4)
            add_quad<R, NP, load_quads>(x.numbers + group * kGroup + i, x.stride, weights + 16 * i, panel, count);
    }
};
