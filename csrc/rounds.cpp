// What many placements take, and estimates of their rounds. The clocks are those of the batched simulator, which
// explains them (flexengine/planner/batched_simulator.py): one rounding per operator, in its order, so both give the
// same bits.
#include <algorithm>
#include <cstdint>
#include <new>
#include <vector>

#include "common.h"

namespace flex {

// Columns of `ChoiceCosts` and `EdgeCosts` of flexengine/planner/round_costs.py, in their order.
enum Column {
    kRecompute,
    kInputD2h,
    kSaveD2h,
    kInputH2d,
    kSaveH2d,
    kWeightsH2d,
    kGradH2d,
    kGradD2h,
    kForwardIssue,
    kBackwardIssue,
    kFetchIssue,
    kFinishIssue,
    kCpuUpdate,
    kUpdateH2d,
    kUpdate,
    kUpdateD2h,
    kUpdateIssue,
    kColumns,
};
enum EdgeColumn { kWeights, kGradIn, kGradOut, kAgain, kTileIn, kTileUpdate, kTileOut, kEdgeColumns };
enum Flag { kShare, kGradsOverWeights, kRefilled, kGradsShare, kAccumulating, kUpdating };
enum Edge { kEmbedding, kHead };

struct EdgeSeconds {
    double forward, backward, finish, forward_issue, backward_issue;
};

}  // namespace flex

// Mirrored field by field by flexengine/native/rounds.py. P placements, L layers, C chunks, K choices of each kind.
struct FlexRounds {
    int64_t num_placements, num_layers, num_chunks, num_kinds, num_choices;
    const int64_t* choices;  // [P, L]
    const int64_t* kinds;    // [L]
    const double* costs;     // [kColumns, kinds, K]
    const double* edges[2];  // [kEdgeColumns, P] of the embedding and of the head
    flex::EdgeSeconds edge_seconds[2];
    const int64_t* slots;     // [3, P]: weight, gradient and offload slots
    const uint8_t* flags;     // [6, P]
    const double* pending;    // [L, P]
    const double* left;       // [P]: sums of pending
    const double* done;       // [P]
    const double* forward;    // [L, C]
    const double* backward;   // [L, C]
    const double* finish;     // [L]
    const uint8_t* in_parts;  // [L]
    int64_t refill, forward_only;
    double h2d_gain, d2h_gain, h2d_beside, d2h_beside, h2d_share, d2h_share, least_cpu_share;
    double* end_out;   // [P]
    double* work_out;  // [L, P], zeros
};

namespace flex {
namespace {

// Slots that are taken and given back in turn.
struct Ring {
    double* free = nullptr;
    int64_t count = 0, taken = 0, given = 0;

    double take() {
        const double at = free[taken];
        taken = taken + 1 < count ? taken + 1 : 0;
        return at;
    }
    void give(double until) {
        free[given] = until;
        given = given + 1 < count ? given + 1 : 0;
    }
};

struct Placement {
    double compute = 0, h2d = 0, d2h = 0, host = 0, h2d_busy = 0, d2h_busy = 0, h2d_rate = 1, d2h_rate = 1, since = 0;
    double cpu = 0, cpu_share = 1, left = 0, worked_until = 0, worked = 0, floor = 0;
    int64_t held = 0;
    Ring weights, grads, saves, hidden;
};

class Rounds {
 public:
    explicit Rounds(const FlexRounds& given) : in_(given), count_(given.num_placements), chunks_(given.num_chunks) {
        std::vector<int64_t> most(3, 1);
        for (int64_t kind = 0; kind < 3; ++kind) {
            const int64_t* counts = in_.slots + kind * count_;
            most[kind] = *std::max_element(counts, counts + count_);
        }
        const int64_t all = most[0] + most[1] + most[2] + chunks_ + 2;
        free_.assign(all * count_, 0.0);
        arrived_.assign(chunks_ * count_, 0.0);
        sent_.assign(2 * in_.num_layers * chunks_ * count_, 0.0);
        places_.resize(count_);
        for (int64_t p = 0; p < count_; ++p) {
            double* free = free_.data() + p * all;
            Placement& one = places_[p];
            one.weights = {free, in_.slots[p], 0, 0};
            one.grads = {free + most[0], in_.slots[count_ + p], 0, 0};
            one.saves = {free + most[0] + most[1], in_.slots[2 * count_ + p], 0, 0};
            one.hidden = {free + most[0] + most[1] + most[2], chunks_ + 2, 0, 0};
            one.cpu = -in_.done[p];
            one.left = in_.left[p];
            any_pending_ |= one.left != 0;
            any_updating_ |= flag(kUpdating, p);
        }
        pending_left_ = any_pending_;
        for (int64_t p = 0; any_updating_ && !by_gpu_ && p < count_; ++p) {
            for (int64_t i = 0; i < in_.num_layers; ++i) by_gpu_ |= cost(kUpdate, i, p) != 0;
        }
    }

    void run() {
        if (any_pending_) {
            for (Placement& one : places_) one.since = 0;
            measure_cpu([](const Placement&) { return 1e-3; });
        }
        for (int64_t p = 0; p < count_; ++p) begin(p);
        for (int64_t i = 0; i < in_.num_layers; ++i) {
            for (int64_t p = 0; p < count_; ++p) forward(i, p);
            measure_link();
        }
        for (int64_t p = 0; p < count_; ++p) turn(p);
        for (int64_t i = in_.num_layers - 1; i >= in_.forward_only; --i) {
            for (int64_t p = 0; p < count_; ++p) backward(i, p);
            measure_link();
        }
        for (int64_t p = 0; p < count_; ++p) finish_round(p);
    }

 private:
    bool flag(Flag which, int64_t p) const { return in_.flags[which * count_ + p] != 0; }
    double cost(Column column, int64_t i, int64_t p) const {
        const int64_t kind = in_.kinds[i], choice = in_.choices[p * in_.num_layers + i];
        return in_.costs[(column * in_.num_kinds + kind) * in_.num_choices + choice];
    }
    double edge(Edge which, EdgeColumn column, int64_t p) const { return in_.edges[which][column * count_ + p]; }
    double& sent(int64_t kind, int64_t i, int64_t c, int64_t p) {
        return sent_[((kind * in_.num_layers + i) * count_ + p) * chunks_ + c];
    }
    double* arrived(int64_t p) { return arrived_.data() + p * chunks_; }

    // -- the link ----------------------------------------------------------------------------------------------------

    void measure_link() {
        const auto elapsed = [](const Placement& one) { return std::max(one.compute - one.since, 1e-30); };
        for (Placement& one : places_) {
            const double seconds = elapsed(one);
            one.h2d_busy = std::min(1.0, one.h2d_busy / seconds);
            one.d2h_busy = std::min(1.0, one.d2h_busy / seconds);
            one.h2d_rate = 1 + in_.h2d_gain * (1 - one.d2h_busy);
            one.d2h_rate = 1 + in_.d2h_gain * (1 - one.h2d_busy);
        }
        if (any_updating_ || pending_left_) measure_cpu(elapsed);
        for (Placement& one : places_) {
            one.h2d_busy = one.d2h_busy = 0;
            one.since = one.compute;
        }
    }

    template <class Elapsed>
    void measure_cpu(Elapsed elapsed) {
        const auto ends = [](const Placement& one) { return one.cpu + one.left / one.cpu_share - one.since; };
        if (!any_updating_ &&
            std::none_of(places_.begin(), places_.end(), [&](const Placement& one) { return ends(one) > 0; })) {
            pending_left_ = false;
            return;
        }
        for (Placement& one : places_) {
            const double until = std::max(ends(one), one.worked / one.cpu_share) / elapsed(one);
            const double busy = std::min(std::max(until, 0.0), 1.0);
            one.worked = 0;
            one.h2d_rate -= busy * std::max(one.h2d_rate - in_.h2d_beside, 0.0);
            one.d2h_rate -= busy * std::max(one.d2h_rate - in_.d2h_beside, 0.0);
            const double rest = 1 - one.h2d_busy * in_.h2d_share - one.d2h_busy * in_.d2h_share;
            one.cpu_share = std::max(in_.least_cpu_share, rest);
        }
    }

    void update(int64_t first, int64_t p, double until) {
        Placement& one = places_[p];
        const double able = std::max(until - one.worked_until, 0.0) * one.cpu_share;
        one.worked_until = std::max(one.worked_until, until);
        double sum = 0, all_done = 0;
        for (int64_t i = first; i < in_.num_layers; ++i) {
            double& waiting = in_.work_out[i * count_ + p];
            sum += waiting;
            const double done = std::min(std::max(able - (sum - waiting), 0.0), waiting);
            waiting -= done;
            all_done += done;
        }
        one.worked += all_done;
    }

    static double fetch(Placement& one, double seconds, double earliest) {
        const double took = seconds / one.h2d_rate;
        one.h2d_busy += took;
        if (!(seconds > 0)) return 0;
        one.h2d = std::max(std::max(one.h2d, earliest), one.host) + took;
        return one.h2d;
    }

    static void send(Placement& one, double seconds, double earliest, bool sends) {
        const double took = seconds / one.d2h_rate;
        one.d2h_busy += took;
        if (sends) one.d2h = std::max(std::max(one.d2h, earliest), one.host) + took;
    }

    // -- layers ------------------------------------------------------------------------------------------------------

    double fetch_weights(int64_t i, int64_t p, bool fetches) {
        Placement& one = places_[p];
        const double earliest = std::max(fetches ? one.weights.take() : 0.0, one.floor);
        one.host += fetches ? cost(kFetchIssue, i, p) : 0.0;
        return fetch(one, fetches ? cost(kWeightsH2d, i, p) : 0.0, earliest);
    }

    void begin(int64_t p) {
        Placement& one = places_[p];
        const EdgeSeconds& seconds = in_.edge_seconds[kEmbedding];
        const double weights = edge(kEmbedding, kWeights, p);
        fetch(one, weights, 0.0);
        one.host += seconds.forward_issue;
        one.compute = std::max(one.h2d, one.host) + seconds.forward;
        one.floor = flag(kShare, p) && weights > 0 ? one.compute : 0.0;
        for (int64_t c = 0; c < chunks_; ++c) {
            arrived(p)[c] = one.compute;
            if (cost(kInputD2h, 0, p) > 0) one.hidden.take();
        }
    }

    void forward(int64_t i, int64_t p) {
        Placement& one = places_[p];
        if (any_pending_) {
            const double pending = in_.pending[i * count_ + p];
            one.cpu = one.cpu + pending / one.cpu_share;
            one.left = one.left - pending;
            if (pending > 0) one.floor = std::max(one.floor, one.cpu);
        }
        const bool streams = cost(kWeightsH2d, i, p) > 0;
        const double input_s = cost(kInputD2h, i, p), save_s = cost(kSaveD2h, i, p);
        const double issue_s = cost(kForwardIssue, i, p);
        const bool takes = i + 1 == in_.num_layers || cost(kInputD2h, i + 1, p) > 0;
        one.compute = std::max(one.compute, fetch_weights(i, p, streams));
        for (int64_t c = 0; c < chunks_; ++c) {
            one.host += issue_s;
            double start = std::max(one.compute, one.host);
            if (save_s > 0) start = std::max(start, one.saves.take());
            start = std::max(start, takes ? one.hidden.take() : 0.0);
            one.compute = start + in_.forward[i * chunks_ + c];
            if (input_s > 0) {
                send(one, input_s, arrived(p)[c], true);
                sent(0, i, c, p) = one.d2h;
                one.hidden.give(std::max(one.d2h, one.compute));
            }
            if (save_s > 0) {
                send(one, save_s, one.compute, true);
                sent(1, i, c, p) = one.d2h;
                one.saves.give(one.d2h);
            }
            arrived(p)[c] = one.compute;
        }
        if (streams) one.weights.give(one.compute);
    }

    void turn(int64_t p) {
        Placement& one = places_[p];
        const bool share = flag(kShare, p);
        edge_backward(kHead, p, flag(kRefilled, p) ? one.compute : 0.0, edge(kHead, kWeights, p), true);
        const double left = flag(kGradsShare, p) && edge(kHead, kGradOut, p) > 0 ? one.d2h : 0.0;
        one.floor = share ? std::max(one.compute, left) : 0.0;
        one.held = share ? 0 : in_.slots[p];
    }

    void backward(int64_t i, int64_t p) {
        Placement& one = places_[p];
        const bool streams = cost(kWeightsH2d, i, p) > 0, still = streams && one.held > 0;
        one.held -= still;
        if (still) one.weights.take();
        double ready = fetch_weights(i, p, streams && !still);
        update_on_gpu(i + 1, p);
        for (int64_t again = 0; again < in_.refill + in_.in_parts[i]; ++again) {
            for (int64_t c = 0; c < chunks_; ++c) ready = fetch_saved(i, c, p, ready, 0.0);
        }
        const double issue_s = cost(kBackwardIssue, i, p), recompute_s = cost(kRecompute, i, p);
        for (int64_t c = chunks_ - 1; c >= 0; --c) {
            one.host += issue_s;
            ready = fetch_saved(i, c, p, ready, in_.backward[i * chunks_ + c] + recompute_s);
        }
        if (streams) one.weights.give(one.compute);
        const double send_s = cost(kGradD2h, i, p);
        const double free = send_s > 0 ? one.grads.take() : 0.0;
        const double again_s = flag(kAccumulating, p) ? cost(kGradH2d, i, p) : 0.0;
        one.host += cost(kFinishIssue, i, p);
        finish(one, free, again_s, in_.finish[i], send_s);
        if (send_s > 0) one.grads.give(one.d2h);
        if (any_updating_) {
            update(i + 1, p, one.d2h);
            in_.work_out[i * count_ + p] = flag(kUpdating, p) * cost(kCpuUpdate, i, p);
        }
    }

    // The layer above, whose update by the GPU is to come: its tiles come behind this one's weights.
    void update_on_gpu(int64_t i, int64_t p) {
        if (!by_gpu_ || i == in_.num_layers) return;
        const bool updating = flag(kUpdating, p);
        places_[p].host += updating * cost(kUpdateIssue, i, p);
        update_group(p, cost(kUpdateH2d, i, p), cost(kUpdate, i, p), cost(kUpdateD2h, i, p));
    }

    void update_group(int64_t p, double h2d_s, double update_s, double d2h_s) {
        Placement& one = places_[p];
        const bool updating = flag(kUpdating, p);
        const double arrived = fetch(one, updating * h2d_s, 0.0);
        one.compute = std::max(one.compute, arrived) + updating * update_s;
        send(one, updating * d2h_s, one.compute, updating && d2h_s > 0);
    }

    double fetch_saved(int64_t i, int64_t c, int64_t p, double ready, double seconds) {
        Placement& one = places_[p];
        const bool input = cost(kInputD2h, i, p) > 0, save = cost(kSaveD2h, i, p) > 0;
        if (input) {
            const double earliest = std::max(one.hidden.take(), sent(0, i, c, p));
            ready = std::max(ready, fetch(one, cost(kInputH2d, i, p), earliest));
        }
        if (save) {
            const double earliest = std::max(one.saves.take(), sent(1, i, c, p));
            ready = std::max(ready, fetch(one, cost(kSaveH2d, i, p), earliest));
        }
        one.compute = std::max(std::max(one.compute, ready), one.host) + seconds;
        if (input) one.hidden.give(one.compute);
        if (save) one.saves.give(one.compute);
        return ready;
    }

    static void finish(Placement& one, double free, double again_s, double finish_s, double send_s) {
        free = std::max(free, fetch(one, again_s, free));
        one.compute = std::max(std::max(one.compute, free), one.host) + finish_s;
        send(one, send_s, one.compute, send_s > 0);
    }

    void edge_backward(Edge which, int64_t p, double floor, double weights_s, bool gives_hidden) {
        Placement& one = places_[p];
        const EdgeSeconds& seconds = in_.edge_seconds[which];
        one.compute = std::max(one.compute, fetch(one, weights_s, floor));
        one.host += seconds.backward_issue;
        const double start = std::max(one.compute, one.host);
        for (int64_t c = 0; gives_hidden && c < chunks_; ++c) {
            one.hidden.give(start + seconds.backward * static_cast<double>(c + 1) / static_cast<double>(chunks_));
        }
        one.compute = start + seconds.backward;
        const double again_s = edge(which, flag(kAccumulating, p) ? kGradIn : kAgain, p);
        const double free = flag(kGradsOverWeights, p) ? one.compute : 0.0;
        finish(one, free, again_s, seconds.finish, edge(which, kGradOut, p));
        if (by_gpu_) update_group(p, edge(which, kTileIn, p), edge(which, kTileUpdate, p), edge(which, kTileOut, p));
    }

    void finish_round(int64_t p) {
        Placement& one = places_[p];
        if (in_.edge_seconds[kEmbedding].backward != 0) {
            if (flag(kShare, p) && cost(kGradD2h, 0, p) > 0) one.compute = std::max(one.compute, one.d2h);
            edge_backward(kEmbedding, p, one.compute, 0.0, false);
        }
        if (in_.forward_only < in_.num_layers) update_on_gpu(in_.forward_only, p);
        const double end = std::max(std::max(one.compute, one.h2d), one.d2h);
        if (any_updating_) update(0, p, end);
        in_.end_out[p] = end;
    }

    const FlexRounds& in_;
    const int64_t count_, chunks_;
    bool any_pending_ = false, pending_left_ = false, any_updating_ = false, by_gpu_ = false;
    std::vector<Placement> places_;
    std::vector<double> free_, arrived_, sent_;
};

}  // namespace
}  // namespace flex

// Seconds of every placement's round, and of the CPU's updates that it leaves, by layer.
extern "C" FLEX_API int flex_estimate_rounds(const FlexRounds* rounds) {
    FLEX_REQUIRE(rounds->num_layers > 0 && rounds->num_chunks > 0, "%lld layers, %lld chunks",
                 static_cast<long long>(rounds->num_layers), static_cast<long long>(rounds->num_chunks));
    try {
        flex::Rounds(*rounds).run();
    } catch (const std::bad_alloc&) {
        return FLEX_FAIL(flex::kNoMemory, "new", "%lld placements", static_cast<long long>(rounds->num_placements));
    }
    return flex::kOk;
}

// Sums, then maxima, over layers of what their choices take: out [columns, P] of columns [columns, kinds, K].
extern "C" FLEX_API int flex_reduce_blocks(const int64_t* columns, const int64_t* kinds, const int64_t* choices,
                                           int64_t num_placements, int64_t num_layers, int64_t num_columns,
                                           int64_t num_sums, int64_t num_kinds, int64_t num_choices, int64_t* out) {
    FLEX_REQUIRE(num_layers > 0, "%lld layers", static_cast<long long>(num_layers));
    for (int64_t f = 0; f < num_columns; ++f) {
        const int64_t* column = columns + f * num_kinds * num_choices;
        for (int64_t p = 0; p < num_placements; ++p) {
            const int64_t* chosen = choices + p * num_layers;
            int64_t found = column[kinds[0] * num_choices + chosen[0]];
            for (int64_t i = 1; i < num_layers; ++i) {
                const int64_t value = column[kinds[i] * num_choices + chosen[i]];
                found = f < num_sums ? found + value : std::max(found, value);
            }
            out[f * num_placements + p] = found;
        }
    }
    return flex::kOk;
}
