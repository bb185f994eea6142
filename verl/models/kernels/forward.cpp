// A step of generation through all layers of a Llama-shaped model.
//
// With many tokens a thread takes a block of them through a layer by itself, then the next block that is due: what it
// works on stays in its caches, no thread waits for another, and one reads keys and values while another multiplies.
// Only where tokens see each other's keys (prompts being read) do threads wait in each layer until these are written.
// With few tokens threads share all of them and divide the weights instead. A token's result is the same, bit for bit,
// either way.

#include "layer_rows.h"
#include "paged_attention.h"
#include "product.h"

#include <atomic>
#include <thread>

extern "C" {

struct Linear { const void *weight, *bias; };  // [N, K]; [N] or null
struct Layer {
    const void *norm, *second_norm;
    Linear query, key, value, output, gate, up, down;
    double norm_eps, second_norm_eps, scale;
    int64_t window;  // 0: none
};
struct Model {
    const Layer* layers;
    const void* norm;
    double norm_eps;
    int64_t count, hidden, heads, kv_heads, head_dim, inner, rotary;
};
// All [tokens, ...]; x holds embeddings and is used up, the others are room to work in.
struct Step {
    void *x, *out, *delta, *query, *key, *value, *mixed;
    const void *cos, *sin;
    void *keys, *values;                  // the cache
    int64_t layer_keys, layer_values;     // bytes of a layer
    int64_t threads;
};
}

namespace {

constexpr int BLOCK_TOKENS = 128;  // at most: what a thread works on fits its second-level cache
constexpr int OWN_TOKENS = 64;     // a thread, at least: each block of tokens reads all weights

template <class T> Weights<T> weights(const Linear& map) {
    return {static_cast<const T*>(map.weight), static_cast<const T*>(map.bias)};
}

// Whether a token sees keys that another one of this step writes.
inline bool is_dependent(const Plan& plan) {
    for (int t = 0; t < plan.tokens; t++)
        if (plan.own_begin[t] < 0 || (t && plan.own_begin[t] == plan.own_begin[t - 1])) return true;
    return false;
}

// A block of tokens on its way through the model. With `parts` > 1 that many threads share it.
template <class T> struct Worker {
    const Model& model;
    const Step& step;
    const Plan& plan;
    int first, end, part, parts;
    uint32_t *packed, *gated;  // room to work in

    void meet() const {
        if (parts > 1) {
#pragma omp barrier
        }
    }
    T* at(void* rows, int t, int64_t width) const { return static_cast<T*>(rows) + t * width; }
    // visit(group, token, tokens) for this thread's groups of the tokens.
    template <class Visit> void groups(Visit visit) const {
        for (int g = part; first + g * GROUP < end; g += parts)
            visit(g, first + g * GROUP, std::min(GROUP, end - first - g * GROUP));
    }
    int count() const { return (end - first + GROUP - 1) / GROUP; }
    void multiply(const uint32_t* x, int64_t K, const Linear& map, void* out, int64_t N) const {
        product(Job<T>{x, end - first, K, N, part, parts}, weights<T>(map), at(out, first, N), N);
    }

    // x += delta, and the norm of that, packed.
    void norm(bool add, const void* weight, double eps) const {
        const int64_t d = model.hidden;
        static thread_local std::vector<T> rows;
        rows.resize(GROUP * d);
        groups([&](int g, int t, int tokens) {
            for (int i = 0; i < tokens; i++)
                norm_row(at(step.x, t + i, d), add ? at(step.delta, t + i, d) : nullptr, static_cast<const T*>(weight),
                         rows.data() + i * d, d, eps);
            pack(rows.data(), d, tokens, place<T>(packed, g, count(), d));
        });
        meet();
    }

    Call call(int l) const {
        const int64_t D = model.head_dim, q = model.heads * D, kv = model.kv_heads * D;
        return {step.query, step.key, step.value, step.mixed,
                static_cast<char*>(step.keys) + l * step.layer_keys,
                static_cast<char*>(step.values) + l * step.layer_values,
                q, D, kv, D, kv, D,
                int32_t(model.heads), int32_t(model.kv_heads), int32_t(D), int32_t(model.layers[l].window),
                int32_t(parts), model.layers[l].scale};
    }

    // Queries, and keys and values into the cache.
    void before_attention(int l) const {
        const Layer& layer = model.layers[l];
        const int64_t d = model.hidden, D = model.head_dim, q = model.heads * D, kv = model.kv_heads * D;
        norm(l > 0, layer.norm, layer.norm_eps);
        multiply(packed, d, layer.query, step.query, q);
        multiply(packed, d, layer.key, step.key, kv);
        multiply(packed, d, layer.value, step.value, kv);
        meet();
        groups([&](int, int begin, int tokens) {
            for (int t = begin; t < begin + tokens; t++) {
                const T *cos = static_cast<const T*>(step.cos) + t * model.rotary;
                const T *sin = static_cast<const T*>(step.sin) + t * model.rotary;
                rotate_row(at(step.query, t, q), cos, sin, model.heads, D, model.rotary);
                rotate_row(at(step.key, t, kv), cos, sin, model.kv_heads, D, model.rotary);
                write_token<T>(plan, call(l), t);
            }
        });
        meet();
    }

    void attention(int l) const {
        const int heads = int(model.kv_heads), *start = plan.tile_start, *stop = start + plan.tiles;
        const int low = int(std::upper_bound(start, stop, first) - start) - 1;
        const int units = int(std::lower_bound(start, stop, end) - start - low) * heads;
        const auto unit = [&](int index) -> Unit {
            const int tile = low + index / heads;
            return {tile, index % heads, std::max(start[tile], first), std::min(start[tile + 1], end)};
        };
        const auto attend = [&](int u) { attend_tile<T>(plan, call(l), unit(u), unit(std::min(u + parts, units - 1))); };
        if (parts == 1) {
            for (int u = 0; u < units; u++) attend(u);
        } else {
#pragma omp for schedule(dynamic, 1)
            for (int u = 0; u < units; u++) attend(u);
        }
    }

    void after_attention(int l) const {
        const Layer& layer = model.layers[l];
        const int64_t d = model.hidden, q = model.heads * model.head_dim, inner = model.inner;
        groups([&](int g, int t, int tokens) {
            pack(at(step.mixed, t, q), q, tokens, place<T>(packed, g, count(), q));
        });
        meet();
        multiply(packed, q, layer.output, step.delta, d);
        meet();
        norm(true, layer.second_norm, layer.second_norm_eps);
        gated_product(Job<T>{packed, end - first, d, inner, part, parts}, weights<T>(layer.gate), weights<T>(layer.up),
                      gated);
        meet();
        multiply(gated, inner, layer.down, step.delta, d);
        meet();
    }

    void last_norm() const {
        const int64_t d = model.hidden;
        groups([&](int, int begin, int tokens) {
            for (int t = begin; t < begin + tokens; t++)
                norm_row(at(step.x, t, d), at(step.delta, t, d), static_cast<const T*>(model.norm), at(step.out, t, d), d,
                         model.norm_eps);
        });
    }
};

// Layer after layer of one block after the other: a thread takes the next that nobody has taken.
template <class OfBlock>
void in_turn(const Model& model, int blocks, std::atomic<int>& next, std::vector<std::atomic<int>>& layers_done,
             OfBlock of_block) {
    const int layers = int(model.count);
    for (int i; (i = next++) < layers * blocks;) {
        const int l = i / blocks, b = i % blocks;
        // Taken long ago, by a thread that may have lost its processor since.
        while (layers_done[b].load(std::memory_order_acquire) < l) std::this_thread::yield();
        const auto worker = of_block(b);
        worker.before_attention(l);
        worker.attention(l);
        worker.after_attention(l);
        if (l + 1 == layers) worker.last_norm();
        layers_done[b].store(l + 1, std::memory_order_release);
    }
}

template <class T>
void forward(const Model& model, const Step& step, const Plan& plan) {
    const int threads = int(step.threads), tokens = plan.tokens, layers = int(model.count);
    const bool shared = tokens < OWN_TOKENS * threads, dependent = is_dependent(plan);
    const int size = shared ? tokens : std::min(BLOCK_TOKENS, whole<GROUP>((tokens + 2 * threads - 1) / (2 * threads)));
    const int blocks = (tokens + size - 1) / size;
    const size_t narrow = std::max(model.hidden, model.heads * model.head_dim) * whole<GROUP>(size) / PER_WORD<T>;
    const size_t wide = model.inner * whole<GROUP>(size) / PER_WORD<T>;
    const Space room = space((narrow + wide) * (shared ? 1 : threads));
    std::atomic<int> next(0);
    std::vector<std::atomic<int>> layers_done(blocks);
    for (auto& count : layers_done) count = 0;
#pragma omp parallel num_threads(threads)
    {
        const int thread = omp_get_thread_num(), parts = shared ? omp_get_num_threads() : 1;
        uint32_t* own = room.get() + (shared ? 0 : thread) * (narrow + wide);
        const auto of_block = [&](int b) -> Worker<T> {
            return {model, step, plan, b * size, std::min((b + 1) * size, tokens), shared ? thread : 0, parts,
                    own, own + narrow};
        };
        if (!shared && !dependent) {
            in_turn(model, blocks, next, layers_done, of_block);
        } else if (shared) {
            for (int l = 0; l < layers; l++) {
                of_block(0).before_attention(l);
                of_block(0).attention(l);
                of_block(0).after_attention(l);
            }
            of_block(0).last_norm();
        } else {
            for (int l = 0; l < layers; l++) {
#pragma omp for schedule(dynamic, 1)
                for (int b = 0; b < blocks; b++) of_block(b).before_attention(l);
#pragma omp for schedule(dynamic, 1)
                for (int b = 0; b < blocks; b++) {
                    of_block(b).attention(l);
                    of_block(b).after_attention(l);
                    if (l + 1 == layers) of_block(b).last_norm();
                }
            }
        }
    }
}

}  // namespace

#define ENTRIES(NAME, T)                                                                     \
    void verl_forward_##NAME(const Model* model, const Step* step, const Plan* plan) {       \
        forward<T>(*model, *step, *plan);                                                    \
    }

extern "C" {
ENTRIES(bf16, bf16)
ENTRIES(fp32, float)
}
