// A step of generation through all layers of a Llama-shaped model.
//
// With many tokens a thread takes a block of them through a layer by itself, then the next block that is due: what it
// works on stays in its caches, and hardly ever does a thread wait for another. Attention of a block is done between the
// tiles of the next one's products, so that keys and values come from memory while the thread multiplies; where tokens
// see keys of this step (prompts being read), not before these are written.
// With few tokens threads share all of them and divide the weights instead. A token's result is the same, bit for bit,
// either way.

#include "layer_rows.h"
#include "paged_attention.h"
#include "product.h"

#include <atomic>
#include <optional>
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
    bool dependent;  // see is_dependent
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
    template <class Other>
    void multiply(const uint32_t* x, int64_t K, const Linear& map, void* out, int64_t N, Other& other) const {
        product(Job<T>{x, end - first, K, N, part, parts}, weights<T>(map), at(out, first, N), N, other);
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

    // Queries, keys and values.
    template <class Other> void before_attention(int l, Other& other) const {
        const Layer& layer = model.layers[l];
        const int64_t d = model.hidden, D = model.head_dim, q = model.heads * D, kv = model.kv_heads * D;
        norm(l > 0, layer.norm, layer.norm_eps);
        multiply(packed, d, layer.query, step.query, q, other);
        multiply(packed, d, layer.key, step.key, kv, other);
        multiply(packed, d, layer.value, step.value, kv, other);
        meet();
        groups([&](int, int begin, int tokens) {
            for (int t = begin; t < begin + tokens; t++) {
                const T *cos = static_cast<const T*>(step.cos) + t * model.rotary;
                const T *sin = static_cast<const T*>(step.sin) + t * model.rotary;
                rotate_row(at(step.query, t, q), cos, sin, model.heads, D, model.rotary);
                rotate_row(at(step.key, t, kv), cos, sin, model.kv_heads, D, model.rotary);
                for (int h = 0; h < model.kv_heads && dependent; h++) write_token<T>(plan, call(l), t, h);
            }
        });
        meet();
    }

    // What attention is divided into.
    std::vector<Unit> units() const {
        const int *start = plan.tile_start, *stop = start + plan.tiles;
        std::vector<Unit> all;
        int tile = int(std::upper_bound(start, stop, first) - start) - 1;
        for (; tile < plan.tiles && start[tile] < end; tile++)
            for (int h = 0; h < model.kv_heads; h++)
                all.push_back({tile, h, std::max(start[tile], first), std::min(start[tile + 1], end)});
        return all;
    }

    void attend(int l, const Unit& unit, const Unit& next) const {
        // Where nobody else waits for a token's key it is written now: its block is going to be read anyway.
        for (int t = unit.first; t < unit.end && !dependent; t++) write_token<T>(plan, call(l), t, unit.head);
        attend_tile<T>(plan, call(l), unit, next);
    }

    void attention(int l) const {
        const std::vector<Unit> all = units();
        const int count = int(all.size());
#pragma omp for schedule(dynamic, 1)
        for (int u = 0; u < count; u++) attend(l, all[u], all[std::min(u + parts, count - 1)]);
    }

    template <class Other> void after_attention(int l, Other& other) const {
        const Layer& layer = model.layers[l];
        const int64_t d = model.hidden, q = model.heads * model.head_dim, inner = model.inner;
        groups([&](int g, int t, int tokens) {
            pack(at(step.mixed, t, q), q, tokens, place<T>(packed, g, count(), q));
        });
        meet();
        multiply(packed, q, layer.output, step.delta, d, other);
        meet();
        norm(true, layer.second_norm, layer.second_norm_eps);
        gated_product(Job<T>{packed, end - first, d, inner, part, parts}, weights<T>(layer.gate), weights<T>(layer.up),
                      gated, other);
        meet();
        multiply(gated, inner, layer.down, step.delta, d, other);
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

// How far a block has come: layers whose keys are written, and whose attention is done.
struct Progress { std::atomic<int> keys{0}, attention{0}; };

// Attention of a block in one layer, unit by unit, beside a product.
template <class T> class Attention {
public:
    explicit Attention(std::vector<Progress>& progress) : progress(progress) {}
    void begin(const Worker<T>& worker, int l, int index) {
        block.emplace(worker);
        layer = l;
        own = index;
        seen = worker.dependent ? 0 : own;
        units = block->units();
        next = 0;
        look_ahead();
    }
    // A unit is computed when all that it reads has been asked for.
    Pieces pause(int most) {
        if (block && asked == wanted.size() && is_ready()) attend();
        if (!block) return {};
        const int count = int(std::min<size_t>(most, wanted.size() - asked));
        asked += count;
        return {wanted.data() + asked - count, count};
    }
    void finish() {
        while (block)
            if (is_ready()) attend();
            else std::this_thread::yield();
    }

private:
    // Tokens see keys of their own block and of those before.
    bool is_ready() {
        while (seen < own && progress[seen].keys.load(std::memory_order_acquire) > layer) seen++;
        return seen == own;
    }
    void attend() {
        block->attend(layer, units[next], units[std::min(next + 1, units.size() - 1)]);
        if (++next < units.size()) return look_ahead();
        block.reset();
        progress[own].attention.store(layer + 1, std::memory_order_release);
    }
    void look_ahead() {
        pieces<T>(block->plan, block->call(layer), units[next], wanted);
        asked = 0;
    }

    std::vector<Progress>& progress;
    std::optional<Worker<T>> block;  // none: there is nothing to do
    int layer, own, seen;            // seen: blocks before that, whose keys are written
    std::vector<Unit> units;
    size_t next, asked;
    std::vector<const char*> wanted;  // by the next unit
};

// From one layer's attention to the next, of one block after the other: a thread takes the next that nobody has taken,
// and the attention of the one that it had before. Whoever waits, waits for what was taken earlier, and has nothing earlier
// left to do: so what was taken first always goes on.
template <class T, class OfBlock>
void in_turn(const Model& model, std::atomic<int>& next, std::vector<Progress>& progress, OfBlock of_block) {
    const int layers = int(model.count), blocks = int(progress.size());
    Attention<T> attention(progress);
    for (int i; (i = next++) < (layers + 1) * blocks;) {
        const int l = i / blocks, b = i % blocks;
        const auto is_due = [&] { return progress[b].attention.load(std::memory_order_acquire) >= l; };
        // It may be this thread's own attention that is missing, or that of one that has lost its processor.
        if (!is_due()) attention.finish();
        while (!is_due()) std::this_thread::yield();
        const Worker<T> worker = of_block(b);
        if (l > 0) worker.after_attention(l - 1, attention);
        if (l < layers) worker.before_attention(l, attention);
        else worker.last_norm();
        progress[b].keys.store(l + 1, std::memory_order_release);
        attention.finish();
        if (l < layers) attention.begin(worker, l, b);
    }
    attention.finish();
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
    std::vector<Progress> progress(blocks);
#pragma omp parallel num_threads(threads)
    {
        const Nothing nothing;
        const int thread = omp_get_thread_num(), parts = shared ? omp_get_num_threads() : 1;
        uint32_t* own = room.get() + (shared ? 0 : thread) * (narrow + wide);
        const auto of_block = [&](int b) -> Worker<T> {
            return {model, step, plan, dependent, b * size, std::min((b + 1) * size, tokens),
                    shared ? thread : 0, parts, own, own + narrow};
        };
        if (!shared) {
            in_turn<T>(model, next, progress, of_block);
        } else {
            for (int l = 0; l < layers; l++) {
                of_block(0).before_attention(l, nothing);
                of_block(0).attention(l);
                of_block(0).after_attention(l, nothing);
            }
            of_block(0).last_norm();
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
