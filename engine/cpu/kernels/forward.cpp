// The forward pass of the decoder families (engine/models) over a paged KV pool, and the plain C interface for Python.
//
// Residual stream, norms, rotation, softmax and logits are float32 in either dtype; matrix operands and KV are in the
// model's dtype (blocks: quantised.h). Source: Llama, arXiv:2302.13971.
#include <algorithm>
#include <memory>
#include <new>
#include <vector>

#include "attention.h"
#include "matrix.h"
#include "model.h"
#include "rows.h"

namespace tandem {

// A layer is computed a block of rows at a time, so that what passes between its products stays in cache. A later
// block's tokens find the keys and values of earlier ones in the pool. Without AVX-512 rows lie as floats, twice as
// wide, mostly in a smaller cache: 0.93 to 0.96 of a prompt's time with floats, 0.97 to 1.05 with blocks
// (bench/results/2026-11-30-engine-avx2.md).
constexpr int block_rows = TANDEM_AVX512 ? 96 : 48;

// Memory that grows and is never zeroed again, aligned to cache lines.
template <class Value>
class Buffer {
  public:
    Value* reserve(std::size_t count) {
        if (count > size_) {
            values_.reset(static_cast<Value*>(::operator new[](count * sizeof(Value), alignment)));
            std::memset(values_.get(), 0, count * sizeof(Value));
            size_ = count;
        }
        return values_.get();
    }

  private:
    static constexpr std::align_val_t alignment{64};
    struct Delete {
        void operator()(Value* values) const { ::operator delete[](values, alignment); }
    };
    std::unique_ptr<Value, Delete> values_;
    std::size_t size_ = 0;
};

class Engine {
  public:
    virtual ~Engine() = default;
    virtual void run(const TandemStep& step) = 0;
};

template <class Unit>
class UnitEngine final : public Engine {
  public:
    explicit UnitEngine(const TandemModel& model)
        : model_(model),
          layers_(model.layers, model.layers + model.num_layers),
          adapter_layers_(model.adapter_layers,
                          model.adapter_layers + static_cast<long>(model.num_adapters) * model.num_layers),
          pool_{static_cast<Unit*>(model.kv_pool), model.num_layers, model.num_kv_heads, model.head_dim},
          group_(model.num_heads / model.num_kv_heads),
          query_size_(model.num_heads * model.head_dim),
          kv_size_(model.num_kv_heads * model.head_dim),
          hidden_stride_(pad_columns(model.hidden_size)),
          qkv_stride_(pad_columns(query_size_ + 2 * kv_size_)),
          gate_up_stride_(pad_columns(2 * model.intermediate_size)) {
        operands_ = operands_memory_.reserve(block_rows * factors(hidden_stride_));
        projected_ = projected_memory_.reserve(block_rows * qkv_stride_);
        queries_ = queries_memory_.reserve(block_rows * factors(query_size_));
        attended_ = attended_memory_.reserve(block_rows * factors(query_size_));
        gated_ = gated_memory_.reserve(block_rows * factors(pad_columns(model.intermediate_size)));
        rounded_head_ = rounded_head_memory_.reserve(units(model.head_dim));
        const int most_inputs = std::max({model.hidden_size, model.intermediate_size, query_size_});
        unpacked_ = unpacked_memory_.reserve(tile_columns * factors(most_inputs));
        if (model.num_adapters == 0) return;
        int most_rank = 0;
        for (const TandemAdapterLayer& layer : adapter_layers_)
            most_rank = std::max({most_rank, layer.qkv.rank, layer.output.rank, layer.gate_up.rank, layer.down.rank});
        shrunk_stride_ = factors(pad_columns(most_rank));
        shrunk_ = shrunk_memory_.reserve(block_rows * shrunk_stride_);
        gate_up_ = gate_up_memory_.reserve(block_rows * gate_up_stride_);
    }

    void run(const TandemStep& step) override {
        const int num_tokens = embed(step);
        cut_into_runs(step);
        for (int layer = 0; layer + 1 < model_.num_layers; ++layer)
            visit_blocks(num_tokens, [&](float* residual, int num_rows, const Run* first_run, const Run* last_run) {
                project_and_place(layer, residual, num_rows, first_run, last_run);
                attend_runs(layer, first_run, last_run);
                add_attended(layer, residual, num_rows, first_run, last_run);
                add_feed_forward(layer, residual, num_rows, first_run, last_run);
            });
        finish_last_layer(step, num_tokens);
        write_logits(step);
    }

  private:
    static constexpr long units(long num_values) { return num_values / values_per_unit<Unit>; }
    static constexpr long factors(long num_values) { return num_values / values_per_factor<Unit>; }

    // Put the tokens' embeddings into the residual stream. Returns the number of tokens.
    int embed(const TandemStep& step) {
        int num_tokens = 0;
        for (int sequence = 0; sequence < step.num_sequences; ++sequence) num_tokens += step.lengths[sequence];
        residual_ = residual_memory_.reserve(num_tokens * hidden_stride_);
        for (int token = 0; token < num_tokens; ++token)
            read_embedding(step.token_ids[token], residual_ + token * hidden_stride_);
        return num_tokens;
    }

    void read_embedding(int token_id, float* row) const {
        const TandemMatrix& stored = model_.embedding;
        if (stored.storage != tandem_floats)
            return matrix(stored, model_.vocab_size, model_.hidden_size).blocks().read_output(token_id, row);
        const Unit* embedding = static_cast<const Unit*>(stored.data) + token_id * units(model_.hidden_size);
        for (int index = 0; index < model_.hidden_size; index += num_lanes)
            store(row + index, load_values(embedding + units(index)));
    }

    PackedMatrix<Unit> matrix(const TandemMatrix& stored, int num_outputs, int num_inputs) const {
        return {stored, num_outputs, num_inputs, unpacked_};
    }

    // Cut the slices where blocks of rows begin, and make room for the scores of the longest context.
    void cut_into_runs(const TandemStep& step) {
        runs_.clear();
        run_blocks_.clear();
        int row = 0, longest = 0;
        for (int sequence = 0; sequence < step.num_sequences; ++sequence) {
            const int end = row + step.lengths[sequence], first_row = row;
            longest = std::max(longest, step.starts[sequence] + step.lengths[sequence]);
            while (row < end) {
                const int num_rows = std::min(end - row, block_rows - row % block_rows);
                runs_.push_back({row % block_rows, num_rows, step.starts[sequence] + row - first_row,
                                 step.block_ids + step.table_offsets[sequence], step.adapters[sequence]});
                run_blocks_.push_back(row / block_rows);
                row += num_rows;
            }
        }
        scratch_.stride = AttentionScratch::stride_for(longest);
        scratch_.scores = scores_memory_.reserve(max_bunch_rows * scratch_.stride);
        scratch_.sums = sums_memory_.reserve(max_bunch_rows * model_.head_dim / num_lanes);
    }

    // Call visit(residual, num_rows, first_run, last_run) for each block of rows.
    template <class Visit>
    void visit_blocks(int num_tokens, Visit&& visit) {
        std::size_t next_run = 0;
        for (int first = 0; first < num_tokens; first += block_rows) {
            const std::size_t first_run = next_run;
            while (next_run < runs_.size() && run_blocks_[next_run] == first / block_rows) ++next_run;
            visit(residual_ + first * hidden_stride_, std::min(block_rows, num_tokens - first),
                  runs_.data() + first_run, runs_.data() + next_run);
        }
    }

    // The last layer: keys and values of all tokens, but the rest only of those whose logits are wanted. Their rows
    // come to stand one after another at the head of the residual stream, each where it stood or further ahead.
    void finish_last_layer(const TandemStep& step, int num_tokens) {
        const int layer = model_.num_layers - 1;
        int num_kept = 0;
        kept_rows_.clear();
        visit_blocks(num_tokens, [&](float* residual, int num_rows, const Run* first_run, const Run* last_run) {
            project_and_place(layer, residual, num_rows, first_run, last_run);
            const int first = static_cast<int>((residual - residual_) / hidden_stride_);
            float* kept = residual_ + num_kept * hidden_stride_;
            kept_runs_.clear();
            for (int logit = static_cast<int>(kept_rows_.size()); logit < step.num_logit_rows; ++logit) {
                const int row = step.logit_rows[logit] - first;
                if (row >= num_rows) break;
                if (kept_runs_.empty() || kept_runs_.back().first_row != row) {
                    const Run& run = *std::find_if(first_run, last_run, [row](const Run& candidate) {
                        return row < candidate.first_row + candidate.num_rows;
                    });
                    kept_runs_.push_back(
                        {row, 1, run.first_position + row - run.first_row, run.block_ids, run.adapter});
                    std::memmove(residual_ + num_kept++ * hidden_stride_, residual + row * hidden_stride_,
                                 hidden_stride_ * sizeof(float));
                }
                kept_rows_.push_back(num_kept - 1);
            }
            if (kept_runs_.empty()) return;
            const int count = static_cast<int>(kept_runs_.size());
            attend_runs(layer, kept_runs_.data(), kept_runs_.data() + count);
            for (int index = 0; index < count; ++index) {
                std::memmove(attended_ + index * factors(query_size_),
                             attended_ + kept_runs_[index].first_row * factors(query_size_),
                             factors(query_size_) * sizeof(Factor<Unit>));
                kept_runs_[index].first_row = index;
            }
            add_attended(layer, kept, count, kept_runs_.data(), kept_runs_.data() + count);
            add_feed_forward(layer, kept, count, kept_runs_.data(), kept_runs_.data() + count);
        });
    }

    // Project rows to heads, and put their keys and values into the pool.
    void project_and_place(int layer, const float* residual, int num_rows, const Run* first_run, const Run* last_run) {
        const TandemLayer& weights = layers_[layer];
        normalise_rows(residual, weights.attention_norm, num_rows);
        multiply(operands_, factors(hidden_stride_), num_rows,
                 matrix(weights.qkv, query_size_ + 2 * kv_size_, model_.hidden_size),
                 StoreSums{projected_, qkv_stride_});
        add_adapted(layer, &TandemAdapterLayer::qkv, first_run, last_run, operands_, factors(hidden_stride_),
                    model_.hidden_size, projected_, qkv_stride_, query_size_ + 2 * kv_size_);
        for (const Run* run = first_run; run != last_run; ++run)
            for (int row = 0; row < run->num_rows; ++row) place_token(layer, *run, row);
    }

    void attend_runs(int layer, const Run* first_run, const Run* last_run) {
        for (const Run* run = first_run; run != last_run; ++run)
            attend(pool_, layer, *run, run + 1 == last_run ? nullptr : run + 1, group_, queries_, block_rows, scratch_,
                   attended_, factors(query_size_));
    }

    // first_run, last_run: of the rows, one after another.
    void add_attended(int layer, float* residual, int num_rows, const Run* first_run, const Run* last_run) {
        multiply(attended_, factors(query_size_), num_rows,
                 matrix(layers_[layer].output, model_.hidden_size, query_size_), AddSums{residual, hidden_stride_});
        add_adapted(layer, &TandemAdapterLayer::output, first_run, last_run, attended_, factors(query_size_),
                    query_size_, residual, hidden_stride_, model_.hidden_size);
    }

    // As above.
    void add_feed_forward(int layer, float* residual, int num_rows, const Run* first_run, const Run* last_run) {
        const TandemLayer& weights = layers_[layer];
        const long gated_stride = factors(pad_columns(model_.intermediate_size));
        normalise_rows(residual, weights.feed_forward_norm, num_rows);
        const PackedMatrix<Unit> gate_up = matrix(weights.gate_up, 2 * model_.intermediate_size, model_.hidden_size);
        if (std::all_of(first_run, last_run, [](const Run& run) { return run.adapter < 0; })) {
            multiply(operands_, factors(hidden_stride_), num_rows, gate_up, StoreSwiglu<Unit>{gated_, gated_stride});
        } else {
            multiply(operands_, factors(hidden_stride_), num_rows, gate_up, StoreSums{gate_up_, gate_up_stride_});
            add_adapted(layer, &TandemAdapterLayer::gate_up, first_run, last_run, operands_, factors(hidden_stride_),
                        model_.hidden_size, gate_up_, gate_up_stride_, 2 * model_.intermediate_size);
            for (int row = 0; row < num_rows; ++row)
                gate(gate_up_ + row * gate_up_stride_, gated_ + row * gated_stride);
        }
        multiply(gated_, gated_stride, num_rows, matrix(weights.down, model_.hidden_size, model_.intermediate_size),
                 AddSums{residual, hidden_stride_});
        add_adapted(layer, &TandemAdapterLayer::down, first_run, last_run, gated_, gated_stride,
                    model_.intermediate_size, residual, hidden_stride_, model_.hidden_size);
    }

    // What StoreSwiglu does, of a row of sums that lie in memory.
    void gate(const float* gate_up, Factor<Unit>* gated) const {
        for (int index = 0; index < model_.intermediate_size; index += num_lanes)
            store_factors<Unit>(gated + factors(index),
                                swiglu(load(gate_up + 2 * index), load(gate_up + 2 * index + num_lanes)));
    }

    // Add to a projection of `inputs` what the runs' adapters make of them; neighbours with one adapter share products.
    void add_adapted(int layer, TandemLowRank TandemAdapterLayer::*projection, const Run* first_run,
                     const Run* last_run, const Factor<Unit>* inputs, long input_stride, int num_inputs, float* outputs,
                     long output_stride, int num_outputs) {
        for (const Run* run = first_run; run != last_run;) {
            const int adapter = run->adapter, first_row = run->first_row;
            int num_rows = 0;
            for (; run != last_run && run->adapter == adapter; ++run) num_rows += run->num_rows;
            if (adapter < 0) continue;
            const TandemLowRank& pair =
                adapter_layers_[static_cast<long>(adapter) * model_.num_layers + layer].*projection;
            if (pair.rank == 0) continue;
            multiply(inputs + first_row * input_stride, input_stride, num_rows,
                     matrix(pair.shrink, pair.rank, num_inputs), StoreFactors<Unit>{shrunk_, shrunk_stride_});
            multiply(shrunk_, shrunk_stride_, num_rows, matrix(pair.expand, num_outputs, pair.rank),
                     AddSums{outputs + first_row * output_stride, output_stride});
        }
    }

    // Turn a projected token into heads; keep its queries for `attend`, put its keys and values into its slot.
    void place_token(int layer, const Run& run, int row) {
        const TandemLayer& weights = layers_[layer];
        const int head_dim = model_.head_dim, head_steps = pool_.head_steps();
        const int position = run.first_position + row, block_row = run.first_row + row;
        float* projected = projected_ + block_row * qkv_stride_;
        if (weights.qkv_bias)
            for (int index = 0; index < query_size_ + 2 * kv_size_; ++index)
                projected[index] += weights.qkv_bias[index];
        for (int head = 0; head < model_.num_heads; ++head) {
            place_head(projected + head * head_dim, weights.query_norm, position);
            const long query_row = (static_cast<long>(head / group_) * block_rows + block_row) * group_ + head % group_;
            round_query(projected + head * head_dim, queries_ + query_row * factors(head_dim));
        }
        const int block = run.block_ids[position / page_tokens], slot = position % page_tokens;
        for (int kv_head = 0; kv_head < model_.num_kv_heads; ++kv_head) {
            float* key = projected + query_size_ + kv_head * head_dim;
            place_head(key, weights.key_norm, position);
            round_head(key, rounded_head_);
            write_key(pool_.keys(block, layer, kv_head), slot, rounded_head_, head_steps);
            round_head(key + kv_size_, rounded_head_);
            write_value(pool_.values(block, layer, kv_head), slot, rounded_head_, head_dim);
        }
    }

    // Normalise a query or key head where the family does (arXiv:2302.05442), and rotate it.
    void place_head(float* head, const float* norm, int position) const {
        const int head_dim = model_.head_dim;
        if (norm) normalise<float>(head, norm, head_dim, model_.rms_norm_eps, head);
        const long first_angle = static_cast<long>(position) * (head_dim / 2);
        rotate(head, model_.cosines + first_angle, model_.sines + first_angle, head_dim);
    }

    void round_query(const float* head, Factor<Unit>* output) const {
        for (int dim = 0; dim < model_.head_dim; dim += num_lanes)
            store_factors<Unit>(output + factors(dim), load(head + dim));
    }

    void round_head(const float* head, Unit* output) const {
        for (int dim = 0; dim < model_.head_dim; dim += num_lanes) store_values(output + units(dim), load(head + dim));
    }

    void normalise_rows(const float* residual, const float* scale, int num_rows) {
        for (int row = 0; row < num_rows; ++row)
            normalise<Unit>(residual + row * hidden_stride_, scale, model_.hidden_size, model_.rms_norm_eps,
                            operands_ + row * factors(hidden_stride_));
    }

    // A row that is finite comes to finite logits: it is normalised before the last product.
    bool is_finite(const float* row) const {
        float zero = 0.0f;
        for (int index = 0; index < model_.hidden_size; ++index) zero += row[index] * 0.0f;
        return zero == 0.0f;
    }

    void write_logits(const TandemStep& step) {
        const PackedMatrix<Unit> head = matrix(model_.head, model_.vocab_size, model_.hidden_size);
        const long logits_stride = pad_columns(model_.vocab_size);
        for (int first = 0; first < step.num_logit_rows; first += block_rows) {
            const int num_rows = std::min(block_rows, step.num_logit_rows - first);
            if (step.only_probes) {
                for (int row = 0; row < num_rows; ++row)
                    step.greedy_ids[first + row] =
                        is_finite(residual_ + kept_rows_[first + row] * hidden_stride_) ? 0 : -1;
                continue;
            }
            for (int row = 0; row < num_rows; ++row)
                normalise<Unit>(residual_ + kept_rows_[first + row] * hidden_stride_, model_.final_norm,
                                model_.hidden_size, model_.rms_norm_eps, operands_ + row * factors(hidden_stride_));
            float* logits = step.logits + first * logits_stride;
            multiply(operands_, factors(hidden_stride_), num_rows, head, StoreSums{logits, logits_stride});
            for (int row = 0; row < num_rows; ++row)
                step.greedy_ids[first + row] = greedy_choice(logits + row * logits_stride, model_.vocab_size);
        }
    }

    const TandemModel model_;
    const std::vector<TandemLayer> layers_;
    const std::vector<TandemAdapterLayer> adapter_layers_;  // [num_adapters, num_layers]
    const KvPool<Unit> pool_;
    const int group_, query_size_, kv_size_;
    const long hidden_stride_, qkv_stride_, gate_up_stride_;
    long shrunk_stride_ = 0;

    std::vector<Run> runs_;        // of the step
    std::vector<int> run_blocks_;  // the block of rows that each run lies in
    std::vector<Run> kept_runs_;   // in the last layer: the tokens of a block of rows whose logits are wanted
    std::vector<int> kept_rows_;   // after it: where in the residual stream each logit row's token stands
    AttentionScratch scratch_ = {};
    float *residual_, *projected_, *gate_up_ = nullptr;
    Factor<Unit> *operands_, *queries_, *attended_, *gated_, *unpacked_, *shrunk_ = nullptr;
    Unit* rounded_head_;
    Buffer<float> residual_memory_, projected_memory_, scores_memory_, gate_up_memory_;
    Buffer<Lanes> sums_memory_;
    Buffer<Factor<Unit>> operands_memory_, queries_memory_, attended_memory_, gated_memory_, unpacked_memory_,
        shrunk_memory_;
    Buffer<Unit> rounded_head_memory_;
};

}  // namespace tandem

extern "C" {

// "avx512bf16", "avx512", "avx2" or "portable": results of different sets may differ in the last bit.
const char* tandem_instruction_set() { return tandem::instruction_set; }

// The model's struct is copied; what it points to must outlive the engine. Null where memory is short.
void* tandem_create(const TandemModel* model) try {
    if (model->is_bfloat16) return static_cast<tandem::Engine*>(new tandem::UnitEngine<tandem::Pair>(*model));
    return static_cast<tandem::Engine*>(new tandem::UnitEngine<float>(*model));
} catch (const std::bad_alloc&) {
    return nullptr;
}

void tandem_destroy(void* engine) { delete static_cast<tandem::Engine*>(engine); }

// Compute one step. Not thread-safe on one engine. 0, or 1 where memory is short.
int tandem_run(void* engine, const TandemStep* step) try {
    static_cast<tandem::Engine*>(engine)->run(*step);
    return 0;
} catch (const std::bad_alloc&) {
    return 1;
}
}
