// Products and packing in whatever format the weight is stored. Included by level.cpp only.

// Room for the rows as the product reads them: widened ones take the most.
inline int64_t prepared_floats(const LinearArgs& a) {
    const bool as_they_are = a.format == Format::fp32 || a.format == Format::bf16;
    return a.x.bf16 || !as_they_are ? a.rows * widened_stride(a.in) : 0;
}

// Row r of the input as the product reads it; nothing for one that is read as it is.
inline void prepare_row(const LinearArgs& a, int64_t r, float* wide) {
    switch (a.format) {
        case Format::fp32:
        case Format::bf16:
            if (a.x.bf16) widen_row(a, r, wide);
            break;
        case Format::int8:
        case Format::q8: ByteProduct::prepare(a, r, wide); break;
        case Format::q4: Nibbles::prepare(a, r, wide); break;
    }
}

inline void float_product(const LinearArgs& a, float* wide) {
    const float* x = a.x.bf16 ? wide : static_cast<const float*>(a.x.data);
    const int64_t ldx = a.x.bf16 ? widened_stride(a.in) : a.x.stride;
    a.format == Format::bf16 ? multiply_floats<uint16_t>(a, x, ldx) : multiply_floats<float>(a, x, ldx);
}

inline void byte_product(const LinearArgs& a, float* wide) {
    const ByteProduct::Rows x = ByteProduct::rows(a, wide);
    a.format == Format::q8 ? multiply_groups<Bytes<true>>(a, x) : multiply_groups<Bytes<false>>(a, x);
}

// On rows that are prepared. By the threads that call it together, which all return when the product is there.
inline void product_in_team(const LinearArgs& a, float* wide) {
    switch (a.format) {
        case Format::fp32:
        case Format::bf16: float_product(a, wide); break;
        case Format::int8:
        case Format::q8: byte_product(a, wide); break;
        case Format::q4: multiply_groups<Nibbles>(a, byte_rows(a, wide)); break;
    }
#pragma omp barrier
}

// The same on rows as they are. `wide` has prepared_floats(a).
inline void linear_in_team(const LinearArgs& a, float* wide) {
#pragma omp for
    for (int64_t r = 0; r < a.rows; ++r) prepare_row(a, r, wide);
    product_in_team(a, wide);
}

void linear(const LinearArgs& a) {
    Scratch wide(prepared_floats(a));
#pragma omp parallel num_threads(a.threads)
    linear_in_team(a, wide.data);
}

void pack(const PackArgs& a) {
    if (a.format == Format::int8)
        pack_quantised(a);
    else
        a.bf16 ? pack_floats<uint16_t>(a) : pack_floats<float>(a);
}

void pack_blocks(const BlockArgs& a) { a.format == Format::q4 ? pack_nibbles(a) : pack_bytes(a); }
