// Linear maps of any number of tokens, without a gradient. Libraries reach half of what the processor can do between a
// few and some hundred rows, as in generation, and in fp32 on processors that they do not favour.

#include "product.h"

namespace {

constexpr int64_t TOKENS = 128, COLUMNS = 192;  // that a thread multiplies at a time

// out [M, N] = x [M, K] w^T + bias; K a multiple of 16, N of 4.
template <class T>
void linear(const T* x, const Weights<T>& map, T* out, int64_t M, int64_t K, int64_t N, int threads) {
    // Laid out at a time are some blocks for each thread, not all tokens: a batch in training has many.
    const int64_t most = std::min(M, 2 * TOKENS * threads), panels = (N + COLUMNS - 1) / COLUMNS;
    const int64_t words = K / PER_WORD<T>;
    const Space room = space((most + GROUP - 1) / GROUP * GROUP * words);
    uint32_t* const packed = room.get();
    // Rows that lie whole pages apart displace each other in the caches.
    const bool direct = N * sizeof(T) % 4096 != 0;
#pragma omp parallel num_threads(threads)
    {
        const Nothing nothing;
        const Space staged = space(TOKENS * COLUMNS / PER_WORD<T>);
        T* const stage = reinterpret_cast<T*>(staged.get());
        for (int64_t begin = 0; begin < M; begin += most) {
            const int64_t span = std::min(most, M - begin), groups = (span + GROUP - 1) / GROUP;
            const int64_t blocks = (span + TOKENS - 1) / TOKENS;
#pragma omp for schedule(static)
            for (int64_t g = 0; g < groups; g++) {
                const int64_t first = g * GROUP;
                pack(x + (begin + first) * K, K, int(std::min<int64_t>(GROUP, span - first)),
                     place<T>(packed, int(g), int(groups), K));
            }
            // All tokens of one panel before the next: weights are read once as long as the last cache holds.
#pragma omp for schedule(dynamic, 1)
            for (int64_t u = 0; u < blocks * panels; u++) {
                const int64_t t = u % blocks * TOKENS, n = u / blocks * COLUMNS;
                const int64_t tokens = std::min(TOKENS, span - t), columns = std::min(COLUMNS, N - n);
                const Job<T> job{packed + t * words, int(tokens), K, columns, 0, 1};
                const Weights<T> part{map.w + n * K, map.bias ? map.bias + n : nullptr};
                T* const to = out + (begin + t) * N + n;
                if (direct) {
                    product(job, part, to, N, nothing);
                    continue;
                }
                product(job, part, stage, columns, nothing);
                for (int64_t r = 0; r < tokens; r++)
                    std::memcpy(to + r * N, stage + r * columns, columns * sizeof(T));
            }
        }
    }
}

}  // namespace

#define ENTRIES(NAME, T)                                                                                            \
    void verl_linear_##NAME(const T* x, const T* w, const T* bias, T* out, int64_t M, int64_t K, int64_t N,         \
                            int threads) {                                                                          \
        linear<T>(x, {w, bias}, out, M, K, N, threads);                                                             \
    }

extern "C" {
ENTRIES(bf16, bf16)
ENTRIES(fp32, float)
}
