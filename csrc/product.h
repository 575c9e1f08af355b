// Products and packing in whatever format the weight is stored. Included by level.cpp only.

// Room for the rows as the product reads them.
inline int64_t prepared_floats(const LinearArgs& a) {
    return a.x.bf16 || a.format == Format::int8 ? a.rows * widened_stride(a.in) : 0;
}

// By the threads that call it together, which all return when the product is there. `wide` has prepared_floats(a).
inline void linear_in_team(const LinearArgs& a, float* wide) {
    if (a.format == Format::int8) {
        quantise_in_team(a, wide);
        multiply_quantised(a, quantised_rows(a, wide));
    } else {
        if (a.x.bf16) widen_in_team(a, wide);
        const float* x = a.x.bf16 ? wide : static_cast<const float*>(a.x.data);
        const int64_t ldx = a.x.bf16 ? widened_stride(a.in) : a.x.stride;
        a.format == Format::bf16 ? multiply_floats<uint16_t>(a, x, ldx) : multiply_floats<float>(a, x, ldx);
    }
#pragma omp barrier
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
