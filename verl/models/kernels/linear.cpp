// Linear maps in bf16 with sums in fp32: out = x w^T + bias for x [M, K], w [N, K], on processors that multiply pairs of
// bf16. Between a few and some hundred rows, as in generation, libraries reach half of what the processor can do.
//
// 32 rows of weights at a time are laid out as the instruction wants them (they are read in place, no copy is kept),
// then multiplied with all of x, a tile of up to 14 rows at a time. Every number of out is one sum over k in ascending
// order, so that a row's result does not depend, bit for bit, on the other rows, nor on the number of threads.

#include "vectors.h"

extern "C" {
struct Map {
    const bf16 *w, *bias;  // [N, K], [N] or null
    bf16* out;             // [M, N]
    int64_t N;             // a multiple of 16
};
}

#if defined(__AVX512BF16__)
#include <memory>

namespace {

constexpr int ROWS = 14;   // two vectors of columns each: 28 of the 32 registers
constexpr int STRIPS = 2;  // of a panel

struct Free {
    void operator()(void* p) const { std::free(p); }
};

// Sixteen rows of weights, and the columns that they give.
struct Strip {
    const bf16 *w, *bias;
    bf16* out;
    int64_t N;
};
inline Strip strip(const Map& map, int64_t K, int64_t n) {
    return {map.w + n * K, map.bias ? map.bias + n : nullptr, map.out + n, map.N};
}

// to[k / 2][c] = the pair w[c][k], w[c][k + 1] of a strip, for k in steps of `stride` vectors.
inline void pack(const bf16* w, int64_t K, __m512i* to, int stride) {
    for (int64_t k = 0; k < K; k += 8) {
        if (k % 32 == 0)  // so many streams the processor does not follow by itself
            for (int c = 0; c < 16; c++) __builtin_prefetch(w + c * K + k + 128);
        // a[i] holds four pairs of each of the rows i, i + 4, i + 8, i + 12: transposed in fours.
        __m512i a[4], b[4];
        for (int i = 0; i < 4; i++) {
            const auto four = [&](int c) {
                return _mm_loadu_si128(reinterpret_cast<const __m128i*>(w + c * K + k));
            };
            a[i] = _mm512_castsi128_si512(four(i));
            a[i] = _mm512_mask_broadcast_i32x4(a[i], 0x00f0, four(i + 4));
            a[i] = _mm512_mask_broadcast_i32x4(a[i], 0x0f00, four(i + 8));
            a[i] = _mm512_mask_broadcast_i32x4(a[i], 0xf000, four(i + 12));
        }
        for (int i = 0; i < 2; i++) {
            b[i] = _mm512_unpacklo_epi32(a[2 * i], a[2 * i + 1]);
            b[i + 2] = _mm512_unpackhi_epi32(a[2 * i], a[2 * i + 1]);
        }
        for (int i = 0; i < 2; i++) {
            _mm512_store_si512(to + (k / 2 + 2 * i) * stride, _mm512_unpacklo_epi64(b[2 * i], b[2 * i + 1]));
            _mm512_store_si512(to + (k / 2 + 2 * i + 1) * stride, _mm512_unpackhi_epi64(b[2 * i], b[2 * i + 1]));
        }
    }
}

// R rows of x, from the m-th on, times a panel of V strips; with GATED times a gate's and its factor's strip. `next` is
// asked for meanwhile, as much as a strip.
template <int R, int V, bool GATED>
void tile(const bf16* x, int64_t K, const __m512i* panel, const Strip* strips, int64_t m, const bf16* next) {
    // Unrolled on demand: else the compiler keeps the sums in memory before and after the loop.
    __m512 sum[R][V];
#pragma GCC unroll 16
    for (int r = 0; r < R; r++)
#pragma GCC unroll 2
        for (int v = 0; v < V; v++) sum[r][v] = _mm512_setzero_ps();
    for (int64_t k = 0; k < K / 2; k++) {
        __builtin_prefetch(next + 32 * k, 0, 2);
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) {
            int32_t bits;
            std::memcpy(&bits, x + (m + r) * K + 2 * k, sizeof bits);
            const __m512bh pair = (__m512bh)_mm512_set1_epi32(bits);
#pragma GCC unroll 2
            for (int v = 0; v < V; v++)
                sum[r][v] = _mm512_dpbf16_ps(sum[r][v], pair, (__m512bh)_mm512_load_si512(panel + k * V + v));
        }
    }
    F bias[V];
    for (int v = 0; v < V; v++) bias[v] = strips[v].bias ? load(strips[v].bias) : F{};
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) {
        if constexpr (GATED) {
            const F gate = rounded<bf16>((F)sum[r][0] + bias[0]), up = rounded<bf16>((F)sum[r][1] + bias[1]);
            store(strips[0].out + (m + r) * strips[0].N, rounded<bf16>(silu(gate)) * up);
        } else {
#pragma GCC unroll 2
            for (int v = 0; v < V; v++) store(strips[v].out + (m + r) * strips[v].N, (F)sum[r][v] + bias[v]);
        }
    }
}

template <int V, bool GATED>
void multiply(int64_t M, const bf16* x, int64_t K, __m512i* panel, const Strip* strips, const Strip* next) {
    for (int v = 0; v < V; v++) pack(strips[v].w, K, panel + v, V);
    // Tiles of nearly equal height: a low one has its sums wait for themselves.
    const int64_t tiles = (M + ROWS - 1) / ROWS;
    for (int64_t t = 0, m = 0; t < tiles; t++) {
        const int rows = int((M - m + tiles - t - 1) / (tiles - t));
        switch (rows) {
#define HEIGHT(R) \
    case R: tile<R, V, GATED>(x, K, panel, strips, m, next[std::min<int64_t>(t, V - 1)].w); break;
            HEIGHT(1) HEIGHT(2) HEIGHT(3) HEIGHT(4) HEIGHT(5) HEIGHT(6) HEIGHT(7)
            HEIGHT(8) HEIGHT(9) HEIGHT(10) HEIGHT(11) HEIGHT(12) HEIGHT(13) HEIGHT(14)
#undef HEIGHT
        }
        m += rows;
    }
}

// The strips of a panel: two of one map, or the last alone; with `gated` one of each of two maps. Their number.
inline int panel_at(const Map* map, bool gated, int64_t K, int64_t index, Strip* strips) {
    if (gated) {
        for (int v = 0; v < STRIPS; v++) strips[v] = strip(map[v], K, 16 * index);
        return STRIPS;
    }
    for (int64_t panels; index >= (panels = (map->N + 31) / 32); map++) index -= panels;
    const int count = 32 * index + 16 < map->N ? 2 : 1;
    for (int v = 0; v < STRIPS; v++) strips[v] = strip(*map, K, 32 * index + (v < count ? 16 * v : 0));
    return count;
}

}  // namespace

// For x [M, K], K a multiple of 32, and each of the maps; or, gated, for two maps of one size: the first's output
// becomes silu of what it would be times what the second's would be.
extern "C" void verl_linear_bf16(const bf16* x, const Map* maps, int count, int gated, int64_t M, int64_t K,
                                 int threads) {
    int64_t panels = gated ? maps->N / 16 : 0;
    for (int i = 0; i < count && !gated; i++) panels += (maps[i].N + 31) / 32;
#pragma omp parallel num_threads(int(std::min<int64_t>(threads, panels)))
    {
        std::unique_ptr<void, Free> space(std::aligned_alloc(VECTOR_BYTES, K * 32 * sizeof(bf16)));
        __m512i* panel = static_cast<__m512i*>(space.get());
#pragma omp for schedule(static)
        for (int64_t p = 0; p < panels; p++) {
            Strip strips[STRIPS], next[STRIPS];
            panel_at(maps, gated, K, std::min(p + 1, panels - 1), next);
            const int wide = panel_at(maps, gated, K, p, strips) == STRIPS;
            if (gated) multiply<2, true>(M, x, K, panel, strips, next);
            else if (wide) multiply<2, false>(M, x, K, panel, strips, next);
            else multiply<1, false>(M, x, K, panel, strips, next);
        }
    }
}
#endif
