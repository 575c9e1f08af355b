// Where the rows of one forward pass find their keys: resolved once, used by every layer.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "kernels.h"

namespace alula {

class Where {
   public:
    struct Input {
        const int32_t *sequence, *table, *prefix, *tail, *tail_len, *first;
        const int64_t *positions, *row_slots;
        int64_t rows, sequences, pages, tail_width, page_size;
        const int64_t* keep;  // numbers of the rows wanted
        int64_t kept;         // how many, or -1 for all

        int64_t wanted() const { return kept < 0 ? rows : kept; }
        int64_t row(int64_t place) const { return kept < 0 ? place : keep[place]; }
    };

    // Of the rows wanted. The others are written too, so their places are looked at.
    explicit Where(const Input& in) : tail_width(in.tail_width) {
        for (int64_t row = 0; row < in.rows; ++row) {
            see(in.row_slots[row]);
            if (in.positions[row] < 0) throw std::invalid_argument("positions_T is negative: number positions from 0");
            if (in.positions[row] > highest_position) highest_position = in.positions[row];
        }
        const int64_t rows = in.wanted();
        tail.reserve(rows * tail_width);
        for (int64_t place = 0; place < rows; ++place) resolve(in, in.row(place));
        for (int64_t place = 0; place < rows;) place = add_run(in, place);
        for (size_t r = 0; r < runs.size(); ++r) runs[r].slots = slots[r].data();
    }

    std::vector<int32_t> count, first, shared, prefix, tail;
    int64_t tail_width;
    int64_t highest_slot = -1, highest_position = -1;
    std::vector<Run> runs;

   private:
    std::vector<std::vector<int32_t>> slots;

    static int64_t slot(const Input& in, int64_t row, int64_t key) {
        const int32_t* line = in.table + in.sequence[row] * in.pages;
        return line[key / in.page_size] * in.page_size + key % in.page_size;
    }

    void see(int64_t at) {
        if (at < 0) throw std::invalid_argument("slot " + std::to_string(at) + " is negative: give slots from 0 up");
        if (at > highest_slot) highest_slot = at;
    }

    // How many keys the row has, and how many of them, in order, lie where the page table says.
    void resolve(const Input& in, int64_t row) {
        if (row < 0 || row >= in.rows)
            throw std::invalid_argument("kept row " + std::to_string(row) + " is out of range: give 0 to " +
                                        std::to_string(in.rows - 1));
        const int64_t held = in.pages * in.page_size, begin = in.prefix[row], length = in.tail_len[row];
        if (in.sequence[row] < 0 || in.sequence[row] >= in.sequences)
            throw std::invalid_argument("sequence_T names a line outside page_table_BP: number the lines from 0");
        if (begin < 0 || begin > held)
            throw std::invalid_argument("prefix_T is longer than the pages of its sequence: widen page_table_BP");
        if (length < 0 || length > in.tail_width)
            throw std::invalid_argument("tail_len_T is longer than tail_TE is wide: widen tail_TE");
        const int64_t keys = begin + length;
        int64_t key = begin;
        const int32_t* own = in.tail + row * in.tail_width;
        while (key < keys && key < held && slot(in, row, key) == own[key - begin]) ++key;
        shared.push_back(int32_t(key));
        for (; key < keys; ++key) see(own[key - begin]);
        count.push_back(int32_t(keys));
        first.push_back(in.first[row] < 0 ? 0 : in.first[row]);
        prefix.push_back(int32_t(begin));
        tail.insert(tail.end(), own, own + in.tail_width);
    }

    int64_t add_run(const Input& in, int64_t begin) {
        const int64_t row = in.row(begin);
        int64_t end = begin, keys = 0;
        for (; end < in.wanted() && in.sequence[in.row(end)] == in.sequence[row]; ++end)
            if (shared[end] > keys) keys = shared[end];
        std::vector<int32_t> line(keys);
        for (int64_t key = 0; key < keys; ++key) {
            line[key] = int32_t(slot(in, row, key));
            see(line[key]);
        }
        slots.push_back(std::move(line));
        runs.push_back({begin, end, nullptr});
        return end;
    }
};

}  // namespace alula
