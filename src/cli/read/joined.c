/* cli/read/joined.c: the list of joined.h. */
#include "cli/read/joined.h"

const char *const joined_projections[][JOINED_MOST] = {
    {"q_proj", "k_proj", "v_proj"},
    {"gate_proj", "up_proj"},
    {"w1", "w3"},
    {"q_a_proj", "kv_a_proj_with_mqa"},
    {"wq_a", "wkv_a_with_mqa"},
    {"wq", "wk", "wv"},
    {"query", "key", "value"},
    {"query_proj", "key_proj", "value_proj"},
};
const size_t joined_count = sizeof joined_projections / sizeof joined_projections[0];
