#include "ffn.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <stdexcept>

namespace tandem {
namespace {

constexpr int kSliceTokens = 64;     // bounds the memory of tables and results
constexpr int kScratchFloats = 4096;  // outputs of one product on one thread, except that four tiles always fit

int ceil_div(int value, int unit) { return (value + unit - 1) / unit; }

int tiles_at_once(std::size_t tokens) {
  return std::max(4, kScratchFloats / kTileRows / static_cast<int>(tokens));
}

Tiles tiles_of(const tandem_matrix& matrix, const std::uint8_t* record, int first, int last, int windows) {
  return {record + matrix.offset + first * matrix.tile_stride, matrix.tile_stride, matrix.window_stride, last - first,
          windows};
}

float base_of(const tandem_matrix& matrix, const std::uint8_t* record) {
  float base = 1.0f;
  if (matrix.base_offset >= 0) std::memcpy(&base, record + matrix.base_offset, sizeof base);
  return base;
}

}  // namespace

Ffn::Ffn(Pool& pool, const Kernel& kernel, const Taps& taps)
    : pool_(pool), kernel_(kernel), scratch_(static_cast<std::size_t>(pool.threads())) {
  std::memcpy(taps_, taps, sizeof taps_);
}

void Ffn::TableSet::size(int rows, int row_windows) {
  windows = row_windows;
  const std::size_t all = static_cast<std::size_t>(rows) * static_cast<std::size_t>(row_windows);
  if (units.size() < all) {
    bytes.resize(all * kTableBytes);
    units.resize(all);
  }
}

void Ffn::run(const tandem_layer& layer, const tandem_batch& batch) {
  if (layer.hidden < 1 || layer.inner < 1 || batch.tokens < 0 || batch.experts_per_token < 1 || batch.dtype < 0 ||
      batch.dtype > 2)
    throw std::invalid_argument("a size or dtype is out of range");
  const std::int64_t picks = std::int64_t{batch.tokens} * batch.experts_per_token;
  for (std::int64_t i = 0; i < picks; i++)
    if (batch.ids[i] >= layer.experts)
      throw std::invalid_argument("expert id " + std::to_string(batch.ids[i]) + " at pick " + std::to_string(i) +
                                  "; the layer has " + std::to_string(layer.experts));
  const std::int64_t row_bytes = std::int64_t{layer.hidden} * bytes_of(static_cast<Dtype>(batch.dtype));
  for (int first = 0; first < batch.tokens; first += kSliceTokens) {
    const std::int64_t pick = std::int64_t{first} * batch.experts_per_token;
    tandem_batch slice = batch;
    slice.tokens = std::min(kSliceTokens, batch.tokens - first);
    slice.x = static_cast<const std::uint8_t*>(batch.x) + first * row_bytes;
    slice.y = static_cast<std::uint8_t*>(batch.y) + first * row_bytes;
    slice.weights = batch.weights + pick;
    slice.ids = batch.ids + pick;
    run_slice(layer, slice);
  }
}

void Ffn::group(const tandem_batch& batch) {
  groups_.clear();
  group_of_.assign(static_cast<std::size_t>(layer_->experts), -1);
  uses_[0] = uses_[1] = false;
  for (int pair = 0; pair < batch.tokens * batch.experts_per_token; pair++) {
    const int expert = batch.ids[pair];
    if (expert < 0) continue;
    int& place = group_of_[static_cast<std::size_t>(expert)];
    if (place < 0) {
      place = static_cast<int>(groups_.size());
      groups_.push_back({expert, layer_->code + layer_->code_of[expert], {}});
      uses_[groups_.back().code->kind] = true;
    }
    groups_[static_cast<std::size_t>(place)].pairs.push_back(pair);
  }
}

void Ffn::run_slice(const tandem_layer& layer, const tandem_batch& batch) {
  layer_ = &layer;
  batch_ = &batch;
  group(batch);
  const int pairs = batch.tokens * batch.experts_per_token;
  const int inputs = layer.weight_on_input ? pairs : batch.tokens;
  input_floats_ = ceil_div(layer.hidden, 64) * 64;
  inputs_.resize(std::max(inputs_.size(), static_cast<std::size_t>(inputs) * static_cast<std::size_t>(input_floats_)));
  for (const Code code : {Code::kSac, Code::kFp4}) {
    if (!uses_[static_cast<int>(code)]) continue;
    input_tables_[static_cast<int>(code)].size(inputs, ceil_div(layer.hidden, window_inputs(code)));
    inner_tables_[static_cast<int>(code)].size(pairs, ceil_div(layer.inner, window_inputs(code)));
  }
  results_.resize(std::max(results_.size(), static_cast<std::size_t>(pairs) * static_cast<std::size_t>(layer.hidden)));
  if (batch.poison) {
    const float nan = std::numeric_limits<float>::quiet_NaN();
    std::fill(results_.begin(), results_.end(), nan);
    std::fill(inputs_.begin(), inputs_.end(), nan);
    for (TableSet* set : {&input_tables_[0], &input_tables_[1], &inner_tables_[0], &inner_tables_[1]})
      std::fill(set->units.begin(), set->units.end(), nan);
    std::memset(batch.y, 0xff,
                static_cast<std::size_t>(batch.tokens) * static_cast<std::size_t>(layer.hidden) *
                    static_cast<std::size_t>(bytes_of(static_cast<Dtype>(batch.dtype))));
  }
  pool_.run([this](Pool::Member& member) {
    Scratch& scratch = scratch_[static_cast<std::size_t>(member.index())];
    build_inputs(member);
    if (!groups_.empty()) {
      if (!member.barrier()) return;
      for (const Share& part : share(ceil_div(layer_->inner, kTileRows), member.index(), member.threads()))
        gate_and_up(part, scratch);
      if (!member.barrier()) return;
      for (const Share& part : share(ceil_div(layer_->hidden, kTileRows), member.index(), member.threads()))
        down(part, scratch);
    }
    if (!member.barrier()) return;
    combine(member);
  });
}

// The tiles of all groups in a row, cut into runs of near-equal cost. Reading a tile costs about as much as two tokens.
std::vector<Ffn::Share> Ffn::share(int tiles, int index, int threads) const {
  constexpr std::int64_t kReadTokens = 2;
  std::int64_t total = 0;
  for (const Group& group : groups_) total += tiles * (kReadTokens + static_cast<std::int64_t>(group.pairs.size()));
  const std::int64_t first = (total * index + threads - 1) / threads;
  const std::int64_t last = (total * (index + 1) + threads - 1) / threads;  // tiles that start in [first, last)
  std::vector<Share> parts;
  std::int64_t start = 0;
  for (std::size_t g = 0; g < groups_.size(); g++) {
    const std::int64_t cost = kReadTokens + static_cast<std::int64_t>(groups_[g].pairs.size());
    const auto tile_at = [&](std::int64_t point) {
      return static_cast<int>(std::clamp<std::int64_t>((point - start + cost - 1) / cost, 0, tiles));
    };
    const int from = first <= start ? 0 : tile_at(first), to = last <= start ? 0 : tile_at(last);
    if (from < to) parts.push_back({static_cast<int>(g), from, to});
    start += cost * tiles;
  }
  return parts;
}

// Rows of x as f32, then their tables: each thread has a range of all rows' windows.
void Ffn::build_inputs(Pool::Member& member) {
  const Dtype dtype = static_cast<Dtype>(batch_->dtype);
  const int hidden = layer_->hidden, windows = input_floats_ / 64;
  const int inputs = layer_->weight_on_input ? batch_->tokens * batch_->experts_per_token : batch_->tokens;
  const std::int64_t all = std::int64_t{inputs} * windows;
  const std::int64_t last = all * (member.index() + 1) / member.threads();
  for (std::int64_t n = all * member.index() / member.threads(); n < last; n++) {
    const int input = static_cast<int>(n / windows), window = static_cast<int>(n % windows);
    const int token = layer_->weight_on_input ? input / batch_->experts_per_token : input;
    float* out = inputs_.data() + std::int64_t{input} * input_floats_ + window * 64;
    const int count = std::min(64, hidden - window * 64);
    const std::uint8_t* x = static_cast<const std::uint8_t*>(batch_->x) +
                            (std::int64_t{token} * hidden + window * 64) * bytes_of(dtype);
    widen(dtype, x, out, count);
    if (layer_->weight_on_input) {
      float weight = batch_->weights[input];
      round_to(dtype, &weight, 1);
      for (int i = 0; i < count; i++) out[i] *= weight;
      round_to(dtype, out, count);
    }
    std::fill(out + count, out + 64, 0.0f);
    for (const Code code : {Code::kSac, Code::kFp4}) {
      if (!uses_[static_cast<int>(code)]) continue;
      TableSet& tables = input_tables_[static_cast<int>(code)];
      const int each = 64 / window_inputs(code);
      const int first_window = window * each;
      kernel_.build(code, taps_, out, std::min(each, tables.windows - first_window),
                    tables.row_bytes(input) + std::ptrdiff_t{first_window} * kTableBytes,
                    tables.row_units(input) + first_window);
    }
  }
}

void Ffn::use_tables(Code code, const Group& group, bool inner, Scratch& scratch) {
  TableSet& tables = (inner ? inner_tables_ : input_tables_)[static_cast<int>(code)];
  scratch.bytes.clear();
  scratch.units.clear();
  for (const int pair : group.pairs) {
    const int row = inner ? pair : input_of(pair);
    scratch.bytes.push_back(tables.row_bytes(row));
    scratch.units.push_back(tables.row_units(row));
  }
}

// The 64 rows of a tile are 64 inputs of the down projection: their tables are built at once.
void Ffn::gate_and_up(const Share& part, Scratch& scratch) {
  const Group& group = groups_[static_cast<std::size_t>(part.group)];
  const Code code = static_cast<Code>(group.code->kind);
  const std::uint8_t* record = layer_->records[group.expert];
  const int tokens = static_cast<int>(group.pairs.size()), windows = ceil_div(layer_->hidden, window_inputs(code));
  const float gate_base = base_of(group.code->gate, record), up_base = base_of(group.code->up, record);
  const Swiglu rule = {layer_->limit, layer_->alpha, layer_->beta};
  TableSet& inner = inner_tables_[static_cast<int>(code)];
  const int each = kTileRows / window_inputs(code);
  use_tables(code, group, false, scratch);
  const Tables tables = {scratch.bytes.data(), scratch.units.data()};
  const int step = tiles_at_once(group.pairs.size());
  const std::size_t floats = static_cast<std::size_t>(tokens * step * kTileRows);
  if (scratch.gate.size() < floats) {
    scratch.gate.resize(floats);
    scratch.up.resize(floats);
  }
  for (int first = part.first; first < part.last; first += step) {
    const int last = std::min(part.last, first + step), row_floats = (last - first) * kTileRows;
    kernel_.multiply(code, tiles_of(group.code->gate, record, first, last, windows), tables, tokens,
                     scratch.gate.data(), row_floats);
    kernel_.multiply(code, tiles_of(group.code->up, record, first, last, windows), tables, tokens, scratch.up.data(),
                     row_floats);
    for (int t = 0; t < tokens; t++)
      for (int tile = first; tile < last; tile++) {
        const float* gate = scratch.gate.data() + t * row_floats + (tile - first) * kTileRows;
        const float* up = scratch.up.data() + t * row_floats + (tile - first) * kTileRows;
        float gate_rows[kTileRows], up_rows[kTileRows], activated[kTileRows];
        for (int i = 0; i < kTileRows; i++) {
          gate_rows[kernel_.place[i]] = gate[i] * gate_base;
          up_rows[kernel_.place[i]] = up[i] * up_base;
        }
        swiglu(rule, gate_rows, up_rows, activated, kTileRows);
        round_to(static_cast<Dtype>(batch_->dtype), activated, kTileRows);
        for (int i = std::min(kTileRows, layer_->inner - tile * kTileRows); i < kTileRows; i++) activated[i] = 0.0f;
        const int row = group.pairs[static_cast<std::size_t>(t)], first_window = tile * each;
        kernel_.build(code, taps_, activated, std::min(each, inner.windows - first_window),
                      inner.row_bytes(row) + std::ptrdiff_t{first_window} * kTableBytes,
                      inner.row_units(row) + first_window);
      }
  }
}

void Ffn::down(const Share& part, Scratch& scratch) {
  const Group& group = groups_[static_cast<std::size_t>(part.group)];
  const Code code = static_cast<Code>(group.code->kind);
  const std::uint8_t* record = layer_->records[group.expert];
  const int tokens = static_cast<int>(group.pairs.size()), windows = ceil_div(layer_->inner, window_inputs(code));
  const float base = base_of(group.code->down, record);
  use_tables(code, group, true, scratch);
  const int step = tiles_at_once(group.pairs.size());
  const std::size_t floats = static_cast<std::size_t>(tokens * step * kTileRows);
  if (scratch.gate.size() < floats) {
    scratch.gate.resize(floats);
    scratch.up.resize(floats);
  }
  for (int first = part.first; first < part.last; first += step) {
    const int last = std::min(part.last, first + step), row_floats = (last - first) * kTileRows;
    kernel_.multiply(code, tiles_of(group.code->down, record, first, last, windows),
                     Tables{scratch.bytes.data(), scratch.units.data()}, tokens, scratch.gate.data(), row_floats);
    for (int t = 0; t < tokens; t++) {
      const int pair = group.pairs[static_cast<std::size_t>(t)];
      const float weight = layer_->weight_on_input ? 1.0f : batch_->weights[pair];
      float* result = results_.data() + std::int64_t{pair} * layer_->hidden;
      for (int tile = first; tile < last; tile++) {
        const float* y = scratch.gate.data() + t * row_floats + (tile - first) * kTileRows;
        for (int i = 0; i < kTileRows; i++) {
          const int row = tile * kTileRows + kernel_.place[i];
          if (row < layer_->hidden) result[row] = weight * (y[i] * base);
        }
      }
    }
  }
}

void Ffn::combine(Pool::Member& member) {
  constexpr int kChunk = 64;
  const Dtype dtype = static_cast<Dtype>(batch_->dtype);
  const int hidden = layer_->hidden, chunks = ceil_div(hidden, kChunk), picked = batch_->experts_per_token;
  const std::int64_t all = std::int64_t{batch_->tokens} * chunks;
  const std::int64_t last = all * (member.index() + 1) / member.threads();
  for (std::int64_t n = all * member.index() / member.threads(); n < last; n++) {
    const std::int64_t token = n / chunks;
    const int start = static_cast<int>(n % chunks) * kChunk, count = std::min(kChunk, hidden - start);
    float sum[kChunk] = {};
    for (std::int64_t pair = token * picked; pair < (token + 1) * picked; pair++) {
      if (batch_->ids[pair] < 0) continue;
      const float* result = results_.data() + pair * hidden + start;
      for (int i = 0; i < count; i++) sum[i] += result[i];
    }
    narrow(dtype, sum, static_cast<std::uint8_t*>(batch_->y) + (token * hidden + start) * bytes_of(dtype), count);
  }
}

}  // namespace tandem
