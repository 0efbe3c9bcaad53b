// The routed experts of one layer for a batch of tokens, on a pool of threads.
//
// The result does not depend on the number of threads or on the other tokens of the batch: each product is summed window
// by window, and a token's experts are added in the order of its ids.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "c_api.h"
#include "lookup.h"
#include "numbers.h"
#include "pool.h"

namespace tandem {

class Ffn {
 public:
  Ffn(Pool& pool, const Kernel& kernel, const Taps& taps);

  // y [T, H] = the weighted sum of the experts that `topk_ids` names. Throws std::runtime_error (a thread died) and
  // std::invalid_argument (shapes or ids that do not fit).
  void run(const tandem_layer& layer, const tandem_batch& batch);

 private:
  // The pairs (token, expert) of one expert.
  struct Group {
    int expert;
    const tandem_code* code;
    std::vector<int> pairs;  // token * K + k
  };
  struct Share {  // tiles first..last-1 of a group
    int group;
    int first;
    int last;
  };
  // Lookup tables of several rows of inputs.
  struct TableSet {
    int windows = 0;
    std::vector<std::uint8_t> bytes;
    std::vector<float> units;
    void size(int rows, int row_windows);
    std::uint8_t* row_bytes(int row) { return bytes.data() + static_cast<std::ptrdiff_t>(row) * windows * kTableBytes; }
    float* row_units(int row) { return units.data() + static_cast<std::ptrdiff_t>(row) * windows; }
  };
  struct Scratch {  // of one thread
    std::vector<float> gate, up;
    std::vector<const std::uint8_t*> bytes;
    std::vector<const float*> units;
  };

  void run_slice(const tandem_layer& layer, const tandem_batch& batch);
  void group(const tandem_batch& batch);
  std::vector<Share> share(int tiles, int index, int threads) const;
  void build_inputs(Pool::Member& member);
  void gate_and_up(const Share& share, Scratch& scratch);
  void down(const Share& share, Scratch& scratch);
  void combine(Pool::Member& member);
  void use_tables(Code code, const Group& group, bool inner, Scratch& scratch);
  int input_of(int pair) const { return layer_->weight_on_input ? pair : pair / batch_->experts_per_token; }

  Pool& pool_;
  const Kernel& kernel_;
  Taps taps_;
  const tandem_layer* layer_ = nullptr;
  const tandem_batch* batch_ = nullptr;
  std::vector<Group> groups_;
  std::vector<int> group_of_;
  std::vector<float> inputs_;  // [inputs][padded hidden]
  int input_floats_ = 0;
  bool uses_[2] = {};
  TableSet input_tables_[2];  // by code
  TableSet inner_tables_[2];
  std::vector<float> results_;  // [T * K][H], weighted
  std::vector<Scratch> scratch_;
};

}  // namespace tandem
