/* cli/report/model_diff.h: differences between two checkpoints. The file of a tensor does not matter. */
#ifndef OPAQ_CLI_REPORT_MODEL_DIFF_H
#define OPAQ_CLI_REPORT_MODEL_DIFF_H

#include "cli/console/progress.h"
#include "cli/read/checkpoint.h"
#include "opaq/parallel.h"

enum difference_kind { ONLY_IN_A, ONLY_IN_B, OTHER_TYPE, OTHER_CONTENT };

struct tensor_difference {
    char *name;
    enum difference_kind kind;
    char *a; /* "BF16 [4096, 128]"; NULL where there is none */
    char *b;
    /* OTHER_CONTENT: bytes, or elements if values were compared */
    uint64_t different;
    uint64_t all;
    double largest; /* of values */
    double sqnr;
};

struct key_difference {
    char *key;
    enum difference_kind kind;
};

struct key_differences {
    struct key_difference *items;
    size_t count;
    size_t capacity;
};

struct model_diff {
    bool has_values; /* weights were compared by value, else tensors by bytes */
    size_t compared; /* tensors in both */
    size_t rounded;  /* of these: equal codes in two layouts whose values differ only by float32 rounding */
    struct tensor_difference *tensors; /* by name */
    size_t count;
    size_t capacity;
    struct key_differences config;   /* of config.json */
    struct key_differences metadata; /* of the files */
    bool is_quantization_equal;
};

/* Bytes of the tensors that both have. */
uint64_t diff_bytes(const struct checkpoint *a, const struct checkpoint *b);

enum opaq_status diff_tensors(const struct checkpoint *a, const struct checkpoint *b, struct progress *progress,
                              struct model_diff *diff, bool *is_stopped, struct opaq_error *error);
enum opaq_status diff_values(const struct checkpoint *a, const struct checkpoint *b, struct progress *progress,
                             struct model_diff *diff, bool *is_stopped, struct opaq_error *error);
void diff_keys(const struct checkpoint *a, const struct checkpoint *b, struct model_diff *diff);
void diff_free(struct model_diff *diff);

#endif
