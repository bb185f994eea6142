// What stands between the matrix products of attention over packed rows: see models/attention.py, whose torch code
// computes the same.

#include "vectors.h"

#include <limits>
#include <vector>

namespace {

constexpr int W = Lanes<float>::count;

// out[b][h][i] = x[index[b][i]][h], zeros where the index is -1. x [T, heads, D].
template <class T>
void gather(const T* x, const int64_t* index, T* out, int64_t rows, int64_t length, int64_t heads, int64_t D,
            int threads) {
    const size_t bytes = D * sizeof(T);
#pragma omp parallel for schedule(static) num_threads(team(rows * length * heads * D, threads))
    for (int64_t b = 0; b < rows; b++)
        for (int64_t h = 0; h < heads; h++)
            for (int64_t i = 0; i < length; i++) {
                const int64_t token = index[b * length + i];
                T* to = out + ((b * heads + h) * length + i) * D;
                if (token < 0) std::memset((void*)to, 0, bytes);
                else std::memcpy((void*)to, x + (token * heads + h) * D, bytes);
            }
}

// The inverse, for queries first..first+length of each row of `whole`: every token stands in one place only.
template <class T>
void scatter(const T* x, const int64_t* index, T* out, int64_t rows, int64_t length, int64_t whole, int64_t heads,
             int64_t D, int threads) {
    const size_t bytes = D * sizeof(T);
#pragma omp parallel for schedule(static) num_threads(team(rows * length * heads * D, threads))
    for (int64_t b = 0; b < rows; b++)
        for (int64_t h = 0; h < heads; h++)
            for (int64_t i = 0; i < length; i++) {
                const int64_t token = index[b * whole + i];
                if (token >= 0) std::memcpy((void*)(out + (token * heads + h) * D), x + ((b * heads + h) * length + i) * D, bytes);
            }
}

// sum[index[b][i]][k] += x[b][k][i], in the order of the rows. sum [T, heads, D] in fp32.
template <class T>
void scatter_add(const T* x, const int64_t* index, float* sum, int64_t rows, int64_t length, int64_t heads, int64_t D,
                 int threads) {
    const int64_t lanes = D / W;
    // A thread has parts of heads to itself: no two of them add to the same number.
#pragma omp parallel for schedule(static) num_threads(team(rows * length * heads * D, threads))
    for (int64_t part = 0; part < heads * lanes; part++) {
        const int64_t h = part / lanes, d = part % lanes * W;
        for (int64_t b = 0; b < rows; b++)
            for (int64_t i = 0; i < length; i++) {
                const int64_t token = index[b * length + i];
                if (token < 0) continue;
                float* to = sum + (token * heads + h) * D + d;
                store(to, load(to) + load(x + ((b * heads + h) * length + i) * D + d));
            }
    }
}

struct Scores {
    void *scores, *gradients;   // [rows, heads, length, keys], keys a multiple of the vector length
    const int64_t* before;      // [rows]: how many of the first `own` keys a row has
    int64_t rows, heads, length, keys, own, first, window;  // `first`: the first query's place in its row
    float scale;
    int threads;
};

// exp(scale * s - top) of the keys that query i of a row sees, into p; returns what to multiply it with.
template <class T>
float probabilities(const Scores& a, const T* s, float* p, int64_t before, int64_t i) {
    // Two runs of keys: those before the row, and the row's own up to the query.
    const int64_t hidden = before + i - a.window + 1;
    const int b0 = int(std::max<int64_t>(0, hidden)), b1 = int(before);
    const int c0 = int(a.own + std::max<int64_t>(0, i - a.window + 1)), c1 = int(a.own + i + 1);
    I lane;
    for (int j = 0; j < W; j++) lane[j] = j;
    F top = F{} - std::numeric_limits<float>::infinity();
    for (int64_t j = 0; j < a.keys; j += W) {
        const I at = lane + int(j), seen = ((at >= b0) & (at < b1)) | ((at >= c0) & (at < c1));
        const F x = load(s + j) * a.scale;
        const F known = seen ? x : F{} - std::numeric_limits<float>::infinity();
        store(p + j, known);
        top = known > top ? known : top;
    }
    const float peak = reduce_max(top);
    F total{};
    for (int64_t j = 0; j < a.keys; j += W) {
        const F e = exp_vector(load(p + j) - peak);
        store(p + j, e);
        total += e;
    }
    return 1.0f / reduce_sum(total);
}

// Scores become probabilities.
template <class T>
void softmax(const Scores& a) {
    const int64_t count = a.rows * a.heads * a.length;
#pragma omp parallel num_threads(team(count * a.keys, a.threads))
    {
        std::vector<float> p(a.keys);
#pragma omp for schedule(static)
        for (int64_t r = 0; r < count; r++) {
            T* s = (T*)a.scores + r * a.keys;
            const float factor = probabilities(a, s, p.data(), a.before[r / (a.heads * a.length)], a.first + r % a.length);
            for (int64_t j = 0; j < a.keys; j += W) store(s + j, load(p.data() + j) * factor);
        }
    }
}

// Scores become probabilities, and gradients of the probabilities those of the scores.
template <class T>
void softmax_backward(const Scores& a) {
    const int64_t count = a.rows * a.heads * a.length;
#pragma omp parallel num_threads(team(count * a.keys, a.threads))
    {
        std::vector<float> p(a.keys);
#pragma omp for schedule(static)
        for (int64_t r = 0; r < count; r++) {
            T *s = (T*)a.scores + r * a.keys, *g = (T*)a.gradients + r * a.keys;
            const float factor = probabilities(a, s, p.data(), a.before[r / (a.heads * a.length)], a.first + r % a.length);
            F dot{};
            for (int64_t j = 0; j < a.keys; j += W) dot += load(p.data() + j) * load(g + j);
            const float mean = reduce_sum(dot) * factor;
            for (int64_t j = 0; j < a.keys; j += W) {
                const F q = load(p.data() + j) * factor;
                store(s + j, q);
                store(g + j, q * (load(g + j) - mean) * a.scale);
            }
        }
    }
}

}  // namespace

#define ENTRIES(NAME, T)                                                                                              \
    void verl_gather_##NAME(const T* x, const int64_t* index, T* out, int64_t rows, int64_t length, int64_t heads,    \
                            int64_t D, int threads) {                                                                 \
        gather(x, index, out, rows, length, heads, D, threads);                                                       \
    }                                                                                                                 \
    void verl_scatter_##NAME(const T* x, const int64_t* index, T* out, int64_t rows, int64_t length, int64_t whole,   \
                             int64_t heads, int64_t D, int threads) {                                                 \
        scatter(x, index, out, rows, length, whole, heads, D, threads);                                               \
    }                                                                                                                 \
    void verl_scatter_add_##NAME(const T* x, const int64_t* index, float* sum, int64_t rows, int64_t length,          \
                                 int64_t heads, int64_t D, int threads) {                                             \
        scatter_add(x, index, sum, rows, length, heads, D, threads);                                                  \
    }                                                                                                                 \
    void verl_softmax_##NAME(T* scores, T* gradients, const int64_t* before, int64_t rows, int64_t heads,             \
                             int64_t length, int64_t keys, int64_t own, int64_t first, int64_t window, float scale,   \
                             int threads) {                                                                           \
        const Scores a{scores, gradients, before, rows, heads, length, keys, own, first, window, scale, threads};     \
        gradients ? softmax_backward<T>(a) : softmax<T>(a);                                                           \
    }

extern "C" {
ENTRIES(bf16, bf16)
ENTRIES(fp32, float)
}
