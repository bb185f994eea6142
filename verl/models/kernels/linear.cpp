// Linear maps in bf16 with sums in fp32: out = x w^T + bias for x [M, K], w [N, K], on processors that multiply pairs of
// bf16. Between a few and some hundred rows, as in generation, libraries reach half of what the processor can do.
//
// 32 rows of w at a time are laid out as the instruction wants them (w itself is read in place, no copy is kept), then
// multiplied with all of x, a tile of 14 rows at a time. Every number of out is one sum over k in ascending order, so
// that a row's result does not depend, bit for bit, on the other rows, nor on the number of threads.

#include "vectors.h"

#if defined(__AVX512BF16__)
#include <immintrin.h>

#include <memory>

namespace {

constexpr int ROWS = 14;   // two vectors of columns each: 28 of the 32 registers
constexpr int COLUMNS = 32;  // of a panel

struct Panel {
    void operator()(void* p) const { std::free(p); }
};

// Rows of 16 pairs to columns.
inline void transpose(__m512i r[16]) {
    __m512i t[16];
    for (int i = 0; i < 8; i++) {
        t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
        t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
    }
    for (int i = 0; i < 4; i++) {
        r[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
        r[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
        r[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
        r[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
    }
    for (int i = 0; i < 4; i++) {
        t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
        t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
        t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
        t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
    }
    for (int i = 0; i < 4; i++) {
        r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
        r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
        r[i + 4] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88);
        r[i + 12] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xdd);
    }
}

// panel[k / 2][c] = the pair w[c][k], w[c][k + 1], for 16 V columns c.
template <int V>
void pack(const bf16* w, int64_t K, __m512i* panel) {
    // The next panel is asked for ahead: 16 rows at once are too many streams for the processor to follow by itself.
    const char* next = reinterpret_cast<const char*>(w + 16 * V * K);
    for (int v = 0; v < V; v++)
        for (int64_t k = 0; k < K; k += 32) {
            __m512i r[16];
            for (int i = 0; i < 16; i++, next += 64) _mm_prefetch(next, _MM_HINT_T1);
            for (int c = 0; c < 16; c++) r[c] = _mm512_loadu_si512(w + (16 * v + c) * K + k);
            transpose(r);
            for (int i = 0; i < 16; i++) _mm512_store_si512(panel + (k / 2 + i) * V + v, r[i]);
        }
}

template <int R, int V>
void tile(const bf16* x, int64_t K, const __m512i* panel, const bf16* bias, bf16* out, int64_t N) {
    __m512 sum[R][V] = {};
    for (int64_t k = 0; k < K / 2; k++) {
        __m512bh w[V];
        for (int v = 0; v < V; v++) w[v] = (__m512bh)_mm512_load_si512(panel + k * V + v);
        for (int r = 0; r < R; r++) {
            int32_t pair;
            std::memcpy(&pair, x + r * K + 2 * k, 4);
            for (int v = 0; v < V; v++)
                sum[r][v] = _mm512_dpbf16_ps(sum[r][v], (__m512bh)_mm512_set1_epi32(pair), w[v]);
        }
    }
    for (int v = 0; v < V; v++) {
        const F offset = bias ? load(bias + 16 * v) : F{};
        for (int r = 0; r < R; r++) store(out + r * N + 16 * v, (F)sum[r][v] + offset);
    }
}

template <int V>
void multiply(int64_t M, const bf16* x, int64_t K, const __m512i* panel, const bf16* bias, bf16* out, int64_t N) {
    for (; M >= ROWS; M -= ROWS, x += ROWS * K, out += ROWS * N) tile<ROWS, V>(x, K, panel, bias, out, N);
    switch (M) {
#define REST(R) case R: return tile<R, V>(x, K, panel, bias, out, N);
        REST(1) REST(2) REST(3) REST(4) REST(5) REST(6) REST(7) REST(8) REST(9) REST(10) REST(11) REST(12) REST(13)
#undef REST
    }
}

}  // namespace

// K a multiple of 32, N of 16; bias may be null.
extern "C" void verl_linear_bf16(const bf16* x, const bf16* w, const bf16* bias, bf16* out, int64_t M, int64_t K,
                                 int64_t N, int threads) {
    const int64_t panels = (N + COLUMNS - 1) / COLUMNS;
#pragma omp parallel num_threads(int(std::min<int64_t>(threads, panels)))
    {
        std::unique_ptr<void, Panel> space(std::aligned_alloc(VECTOR_BYTES, K * COLUMNS * sizeof(bf16)));
        __m512i* panel = static_cast<__m512i*>(space.get());
#pragma omp for schedule(static)
        for (int64_t n = 0; n < N; n += COLUMNS) {
            const bf16* offset = bias ? bias + n : nullptr;
            if (n + COLUMNS <= N) {
                pack<2>(w + n * K, K, panel);
                multiply<2>(M, x, K, panel, offset, out + n, N);
            } else {
                pack<1>(w + n * K, K, panel);
                multiply<1>(M, x, K, panel, offset, out + n, N);
            }
        }
    }
}
#endif
