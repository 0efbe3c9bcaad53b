// What a launch is told. Compiled into the kernels; gpu.py packs the same fields in the same order.
#pragma once

constexpr int kItemRowsMax = 16, kPairsMax = 1024, kBlockThreads = 128, kSplitsMax = 8, kWays = 3;
constexpr int kPartsMax = 512;  // parts times pairs that are kept at once

struct Matrix {  // of a record, in bytes
  long long offset, tile_stride, window_stride;
  long long windows;
};

struct Kind {
  Matrix gate, up, down;
  long long bases;  // offset of three f32; below 0: none
};

struct Item {  // an expert and some of the pairs (token, k) that picked it
  const unsigned char* record;
  int kind, rows;
  int pair[kItemRowsMax];
};

struct Params {
  Kind kinds[2];  // sac, fp4
  const void* x;
  void* y;
  const int* ids;          // [tokens, picked]; below 0: none
  const float* weights;    // [tokens, picked]
  const unsigned char* const* records;  // [experts]; null: not on this GPU
  const unsigned char* kinds_of;        // [experts]
  Item* items;
  int* item_count;
  int* item_of;  // [tokens * picked]; below 0: nobody computes this pair here
  unsigned char* x_features[kWays];
  float2* x_units[kWays];
  long long x_feature_stride[kWays], x_unit_stride[kWays];
  unsigned char* h_features;
  float2* h_units;
  float* gate_parts;
  float* down_parts;
  float filter[4][6];
  float limit, alpha, beta;
  int hidden, experts, tokens, picked, dtype, weight_on_input, item_rows;
  int ways;  // bit w: features of way w are needed
  int few;   // rows of an item that are still multiplied by planes
  int inner, input_windows, inner_tiles, hidden_tiles;
  int warps;  // that fill the GPU
};
