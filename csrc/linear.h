// y = x W^T + b. Included by level.cpp only.
//
// The weight lies in panels of 16 outputs: panel p holds, for each input i, outputs 16 p .. 16 p + 15 (zeros past the
// last). Each result is one chain of fused multiply-adds over i = 0, 1, 2, ..., then the bias, then one rounding. How
// rows and panels are grouped, and where the chain is put down and taken up again, does not touch it.

constexpr int kTileRows = 6;
constexpr int64_t kInputBlock = 512;               // a panel block and the rows of a tile fit the first-level cache
constexpr int64_t kRowBlockBytes = 192 * 1024;     // rows of a block fit the second-level cache
constexpr int kPrefetchInputs = 16;

// Panels next to each other in registers for a tile of R rows.
constexpr int panels_for(int rows) {
    int fit = kAccumulators / rows;
    return fit < 1 ? 1 : fit > 4 ? 4 : fit;
}

// Bytes to fetch ahead: `lines` cache lines for every kPrefetchInputs inputs.
struct Ahead {
    const char* at;
    int lines;
};

// c[r][p] (+)= chain over i of x[r][i] * w[p][i], for R rows and NP panels; c rows are `ldc` floats apart.
template <int R, int NP, class W>
inline void tile(const float* x, int64_t ldx, const W* w, int64_t panel, int64_t count, float* c, int64_t ldc,
                 bool resume, Ahead ahead) {
    V acc[R][NP];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int p = 0; p < NP; ++p) acc[r][p] = resume ? load(c + r * ldc + 16 * p) : zero();
    for (int64_t begin = 0; begin < count; begin += kPrefetchInputs) {
        for (int line = 0; line < ahead.lines; ++line, ahead.at += 64) prefetch(ahead.at);
        int64_t end = begin + kPrefetchInputs < count ? begin + kPrefetchInputs : count;
        for (int64_t i = begin; i < end; ++i) {
            V weight[NP];
#pragma GCC unroll 4
            for (int p = 0; p < NP; ++p) weight[p] = load_packed(w + p * panel + i * 16);
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) {
                V value = set1(x[r * ldx + i]);
#pragma GCC unroll 4
                for (int p = 0; p < NP; ++p) acc[r][p] = fma(value, weight[p], acc[r][p]);
            }
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int p = 0; p < NP; ++p) store(c + r * ldc + 16 * p, acc[r][p]);
}

template <class W>
using TileFn = void (*)(const float*, int64_t, const W*, int64_t, int64_t, float*, int64_t, bool, Ahead);

template <int R, class W>
void tile_wide(const float* x, int64_t ldx, const W* w, int64_t panel, int64_t count, float* c, int64_t ldc,
               bool resume, Ahead ahead) {
    tile<R, panels_for(R), W>(x, ldx, w, panel, count, c, ldc, resume, ahead);
}

template <int R, class W>
void tile_single(const float* x, int64_t ldx, const W* w, int64_t panel, int64_t count, float* c, int64_t ldc,
                 bool resume, Ahead ahead) {
    tile<R, 1, W>(x, ldx, w, panel, count, c, ldc, resume, ahead);
}

template <class W>
TileFn<W> tile_function(int rows, bool wide) {
    static constexpr TileFn<W> single[kTileRows] = {tile_single<1, W>, tile_single<2, W>, tile_single<3, W>,
                                                    tile_single<4, W>, tile_single<5, W>, tile_single<6, W>};
    static constexpr TileFn<W> many[kTileRows] = {tile_wide<1, W>, tile_wide<2, W>, tile_wide<3, W>,
                                                  tile_wide<4, W>, tile_wide<5, W>, tile_wide<6, W>};
    return wide ? many[rows - 1] : single[rows - 1];
}

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

// Bias, rounding and storing of `rows` x `panels` finished results.
inline void finish(const LinearArgs& a, const float* c, int64_t ldc, int64_t row, int64_t rows, int64_t panel,
                   int64_t panels) {
    for (int64_t r = 0; r < rows; ++r) {
        void* y = row_at(a.y, a.y_bf16, (row + r) * a.out);
        for (int64_t p = 0; p < panels; ++p) {
            int64_t at = (panel + p) * 16;
            V value = load(c + r * ldc + p * 16);
            if (a.bias) value = add(value, row_load(a.bias, false, at, a.out));
            row_store(y, a.y_bf16, at, a.out, value);
        }
    }
}

// One block of rows times `panels` neighbouring panels.
template <class W>
void multiply_block(const LinearArgs& a, const float* x, int64_t ldx, int64_t row, int64_t rows, int64_t panel,
                    int64_t panels, float* c) {
    const int64_t ldc = panels * 16;
    const int64_t tiles = ceil_div(rows, kTileRows), blocks = tiles > 1 ? ceil_div(a.in, kInputBlock) : 1;
    const W* w = static_cast<const W*>(a.weight) + panel * 16 * a.in;
    const char* next = reinterpret_cast<const char*>(w + panels * 16 * a.in);
    const int64_t lines = kPrefetchInputs * 16 * int64_t(sizeof(W)) * panels / 64;
    for (int64_t block = 0; block < blocks; ++block) {
        int64_t begin = a.in * block / blocks, end = a.in * (block + 1) / blocks;
        for (int64_t t = 0; t < tiles; ++t) {
            int64_t low = rows * t / tiles, high = rows * (t + 1) / tiles;
            int share = int(lines * (t + 1) / tiles - lines * t / tiles);
            tile_function<W>(int(high - low), panels > 1)(x + low * ldx + begin, ldx, w + begin * 16, 16 * a.in,
                                                          end - begin, c + low * ldc, ldc, block > 0, {next, share});
            next += share * 64 * ceil_div(end - begin, kPrefetchInputs);
        }
    }
    finish(a, c, ldc, row, rows, panel, panels);
}

// bf16 rows are widened first. 16 values more than needed keep rows off the same cache sets.
inline int64_t widened_stride(int64_t in) { return ceil_div(in, 16) * 16 + 16; }

inline void widen_row(const LinearArgs& a, int64_t r, float* wide) {
    const int64_t ld = widened_stride(a.in);
    const void* x = row_at(a.x, r);
    for (int64_t i = 0; i < a.in; i += 16) row_store(wide + r * ld, false, i, ld, row_load(x, true, i, a.in));
}

// Calls block(row, rows, panel, panels, sums) for all blocks of the calling thread's share of the outputs. x_bytes: of
// one row as the product reads it. sums: room for the results of a block.
template <int TileRows, class Block>
void share_outputs(const LinearArgs& a, int64_t x_bytes, Block block) {
    const int64_t panels = ceil_div(a.out, 16);
    const int64_t fit = larger(kRowBlockBytes / x_bytes / TileRows, 2) * TileRows;
    const int64_t row_block = ceil_div(a.rows, ceil_div(a.rows, fit));
    const int group = panels_for(a.rows > TileRows ? TileRows : int(a.rows));
    const int64_t thread = omp_get_thread_num(), threads = omp_get_num_threads();
    const int64_t begin = panels * thread / threads, end = panels * (thread + 1) / threads;
    Scratch sums(row_block * 16 * group);
    for (int64_t row = 0; row < a.rows; row += row_block) {
        const int64_t rows = smaller(row_block, a.rows - row);
        for (int64_t panel = begin; panel < end;) {
            const int64_t take = end - panel >= group ? group : 1;
            block(row, rows, panel, take, sums.data);
            panel += take;
        }
    }
}

template <class W>
void multiply_floats(const LinearArgs& a, const float* x, int64_t ldx) {
    share_outputs<kTileRows>(a, 4 * a.in, [&](int64_t row, int64_t rows, int64_t panel, int64_t panels, float* sums) {
        multiply_block<W>(a, x + row * ldx, ldx, row, rows, panel, panels, sums);
    });
}

template <class W>
void pack_floats(const PackArgs& a) {
    const int64_t panels = ceil_div(a.out, 16);
    const W* from = static_cast<const W*>(a.weight);
    W* to = static_cast<W*>(a.packed);
#pragma omp parallel for num_threads(a.threads)
    for (int64_t p = 0; p < panels; ++p)
        for (int lane = 0; lane < 16; ++lane) {
            const int64_t output = p * 16 + lane;
            const int place = sizeof(W) == 2 ? packed_place(lane) : lane;
            for (int64_t i = 0; i < a.in; ++i)
                to[(p * a.in + i) * 16 + place] = output < a.out ? from[output * a.in + i] : W(0);
        }
}
