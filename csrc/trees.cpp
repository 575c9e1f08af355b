// Growing draft trees: the candidates of several sequences, level by level. The trees of draft/expand.py.

#include <nanobind/nanobind.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <stdexcept>
#include <vector>

#include "trees.h"

namespace nb = nanobind;

namespace alula {
namespace {

// floor: the least score of a node.
struct Limits {
    int64_t nodes, depth, branch;
    double floor;
};

// Children of one row, best first.
struct Children {
    const int64_t* tokens;
    const float* logs;
    int64_t count;
};

// The candidates of one tree, numbered as they come; number 0 is the root. A candidate that is not among the best
// nodes - 1 so far can never come back, nor can its descendants, so it is not even noted.
class Candidates {
   public:
    Candidates(int64_t root, const Limits& limits) : limits_(limits), all_{{root, -1, -1, 0.0}} {
        if (limits.nodes > 1 && limits.depth > 0) frontier_ = {0};
    }

    // children[i]: those of the frontier's node i, which is row `row` + i of all frontiers.
    void grow(int64_t row, const int64_t* tokens, const float* logs, int64_t width) {
        const int64_t first = count();
        const double worst = is_full() ? all_[best_.back()].score : -std::numeric_limits<double>::infinity();
        for (const int64_t parent : frontier_) {
            add({tokens, logs, std::min(width, limits_.branch)}, parent, row++, worst);
            tokens += width, logs += width;
        }
        keep_best(first);
        frontier_.clear();
        if (++level_ >= limits_.depth) return;
        for (const int64_t node : best_)
            if (node >= first && int64_t(frontier_.size()) < limits_.branch) frontier_.push_back(node);
    }

    const std::vector<int64_t>& frontier() const { return frontier_; }
    int64_t row(int64_t node) const { return all_[node].row; }
    int64_t token(int64_t node) const { return all_[node].token; }
    int64_t branch() const { return limits_.branch; }
    int64_t kept() const { return 1 + int64_t(best_.size()); }

    // Kept nodes in the order of their numbers, which puts parents first.
    void write(int64_t* tokens, int64_t* parents, float* scores) const {
        std::vector<int64_t> nodes{0}, place(all_.size());
        nodes.insert(nodes.end(), best_.begin(), best_.end());
        std::sort(nodes.begin(), nodes.end());
        for (size_t i = 0; i < nodes.size(); ++i) place[nodes[i]] = int64_t(i);
        for (size_t i = 0; i < nodes.size(); ++i) {
            const Candidate& kept = all_[nodes[i]];
            tokens[i] = kept.token;
            parents[i] = kept.parent < 0 ? -1 : place[kept.parent];
            scores[i] = float(kept.score);
        }
    }

   private:
    struct Candidate {
        int64_t token, parent, row;
        double score;
    };

    int64_t count() const { return int64_t(all_.size()); }
    bool is_full() const { return int64_t(best_.size()) == limits_.nodes - 1; }

    void add(const Children& children, int64_t parent, int64_t row, double worst) {
        const double above = all_[parent].score;
        for (int64_t i = 0; i < children.count; ++i) {
            const double score = above + std::min(double(children.logs[i]), 0.0);
            // Ties lose to what came before; NaN is no score either.
            if (!(score > worst && score >= limits_.floor)) return;
            all_.push_back({children.tokens[i], parent, row, score});
        }
    }

    // By (score descending, number): a child never scores above its parent and is numbered after it.
    void keep_best(int64_t first) {
        for (int64_t node = first; node < count(); ++node) best_.push_back(node);
        std::sort(best_.begin(), best_.end(), [this](int64_t a, int64_t b) {
            return all_[a].score > all_[b].score || (all_[a].score == all_[b].score && a < b);
        });
        if (int64_t(best_.size()) > limits_.nodes - 1) best_.resize(limits_.nodes - 1);
    }

    Limits limits_;
    std::vector<Candidate> all_;
    std::vector<int64_t> best_, frontier_;
    int64_t level_ = 0;
};

class Trees {
   public:
    // Per lane.
    Trees(uintptr_t roots, uintptr_t limits, uintptr_t floors, int64_t lanes) {
        const auto* root = reinterpret_cast<const int64_t*>(roots);
        const auto* limit = reinterpret_cast<const int64_t*>(limits);
        const auto* floor = reinterpret_cast<const double*>(floors);
        for (int64_t lane = 0; lane < lanes; ++lane, limit += 3)
            lanes_.emplace_back(root[lane], Limits{limit[0], limit[1], limit[2], floor[lane]});
    }

    int64_t size() const {
        int64_t rows = 0;
        for (const Candidates& lane : lanes_) rows += int64_t(lane.frontier().size());
        return rows;
    }

    // The most children that a row of the frontier may get.
    int64_t children() const {
        int64_t most = 0;
        for (const Candidates& lane : lanes_)
            if (!lane.frontier().empty()) most = std::max(most, lane.branch());
        return most;
    }

    // Lane, row in the frontier before, and token of each row: three lines of size() numbers.
    void frontier(uintptr_t y) const {
        const int64_t rows = size();
        auto* lane_of = reinterpret_cast<int64_t*>(y);
        int64_t* origin = lane_of + rows;
        int64_t* token = origin + rows;
        for (size_t number = 0; number < lanes_.size(); ++number)
            for (const int64_t node : lanes_[number].frontier()) {
                *lane_of++ = int64_t(number);
                *origin++ = lanes_[number].row(node);
                *token++ = lanes_[number].token(node);
            }
    }

    void grow(uintptr_t tokens, uintptr_t logs, int64_t rows, int64_t width) {
        if (rows != size()) throw std::invalid_argument("rows of children are not those of the frontier: give one each");
        const auto* token = reinterpret_cast<const int64_t*>(tokens);
        const auto* log = reinterpret_cast<const float*>(logs);
        int64_t row = 0;
        for (Candidates& lane : lanes_) {
            const int64_t own = int64_t(lane.frontier().size());
            if (own) lane.grow(row, token + row * width, log + row * width, width);
            row += own;
        }
    }

    int64_t nodes(int64_t lane) const { return lanes_.at(lane).kept(); }

    // Tokens, then parents, of nodes(lane) nodes.
    void tree(int64_t lane, uintptr_t tokens_and_parents, uintptr_t scores) const {
        auto* tokens = reinterpret_cast<int64_t*>(tokens_and_parents);
        const Candidates& found = lanes_.at(lane);
        found.write(tokens, tokens + found.kept(), reinterpret_cast<float*>(scores));
    }

   private:
    std::vector<Candidates> lanes_;
};

}  // namespace

void bind_trees(nb::module_& m) {
    nb::class_<Trees>(m, "Trees")
        .def(nb::init<uintptr_t, uintptr_t, uintptr_t, int64_t>())
        .def_prop_ro("size", &Trees::size)
        .def_prop_ro("children", &Trees::children)
        .def("frontier", &Trees::frontier)
        .def("grow", &Trees::grow)
        .def("nodes", &Trees::nodes)
        .def("tree", &Trees::tree);
}

}  // namespace alula
