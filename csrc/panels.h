// Unpacking 16 keys and values of one head to fp32. Moves data only. Included by level.cpp only.

constexpr int kPanelKeys = 16;

// Keys (transposed, [head_dim][16]) and values ([16][padded head_dim]) of one panel.
struct Panel {
    float *keys, *values;
};

#if defined(__AVX2__)
inline __m256 eight(const void* row, bool bf16, int64_t at) {
    if (!bf16) return _mm256_loadu_ps(static_cast<const float*>(row) + at);
    const __m128i* p = reinterpret_cast<const __m128i*>(static_cast<const uint16_t*>(row) + at);
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(p)), 16));
}

// out[d][k] = rows[k][at + d] for 8 x 8.
inline void transpose_8(const void* const* rows, bool bf16, int64_t at, float* out) {
    __m256 r[8], s[8];
    for (int k = 0; k < 8; ++k) r[k] = eight(rows[k], bf16, at);
    for (int k = 0; k < 8; k += 2) {
        s[k] = _mm256_unpacklo_ps(r[k], r[k + 1]);
        s[k + 1] = _mm256_unpackhi_ps(r[k], r[k + 1]);
    }
    for (int k = 0; k < 8; k += 4) {
        r[k] = _mm256_shuffle_ps(s[k], s[k + 2], 0x44);
        r[k + 1] = _mm256_shuffle_ps(s[k], s[k + 2], 0xee);
        r[k + 2] = _mm256_shuffle_ps(s[k + 1], s[k + 3], 0x44);
        r[k + 3] = _mm256_shuffle_ps(s[k + 1], s[k + 3], 0xee);
    }
    for (int d = 0; d < 4; ++d) {
        _mm256_storeu_ps(out + d * kPanelKeys, _mm256_permute2f128_ps(r[d], r[d + 4], 0x20));
        _mm256_storeu_ps(out + (d + 4) * kPanelKeys, _mm256_permute2f128_ps(r[d], r[d + 4], 0x31));
    }
}
constexpr int64_t kTransposed = 8;

// out[d][k] = rows[k][at + d] for kTransposed d and 16 k.
inline void transpose(const void* const* rows, bool bf16, int64_t at, float* out) {
    transpose_8(rows, bf16, at, out);
    transpose_8(rows + 8, bf16, at, out + 8);
}
#elif defined(ALULA_NEON)
constexpr int64_t kTransposed = 4;

inline float32x4_t four(const void* row, bool bf16, int64_t at) {
    if (!bf16) return vld1q_f32(static_cast<const float*>(row) + at);
    return as_float(vshll_n_u16(vld1_u16(static_cast<const uint16_t*>(row) + at), 16));
}

inline void transpose(const void* const* rows, bool bf16, int64_t at, float* out) {
    for (int k = 0; k < kPanelKeys; k += 4) {
        float32x4x4_t r;
        for (int i = 0; i < 4; ++i) r.val[i] = four(rows[k + i], bf16, at);
        float turned[16];
        vst4q_f32(turned, r);
        for (int d = 0; d < 4; ++d) vst1q_f32(out + d * kPanelKeys + k, vld1q_f32(turned + 4 * d));
    }
}
#else
inline void transpose(const void* const*, bool, int64_t, float*) {}
constexpr int64_t kTransposed = 1 << 30;  // all of it one by one
#endif

inline void unpack_keys(const void* const* rows, bool bf16, int64_t head_dim, float* out) {
    int64_t d = 0;
    for (; d + kTransposed <= head_dim; d += kTransposed) transpose(rows, bf16, d, out + d * kPanelKeys);
    for (; d < head_dim; ++d)
        for (int k = 0; k < kPanelKeys; ++k) out[d * kPanelKeys + k] = row_value(rows[k], bf16, d);
}

inline void unpack_values(const void* const* rows, bool bf16, int64_t head_dim, int64_t padded, float* out) {
    if (padded != head_dim) {
        for (int k = 0; k < kPanelKeys; ++k)
            for (int64_t d = 0; d < padded; d += 16) store(out + k * padded + d, row_load(rows[k], bf16, d, head_dim));
        return;
    }
    for (int k = 0; k < kPanelKeys; ++k)
        for (int64_t d = 0; d < padded; d += 16) store(out + k * padded + d, row_load(rows[k], bf16, d));
}
