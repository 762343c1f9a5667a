/* peer_ggml.c: products with 4- and 8-bit weights beside those of ggml, the library of llama.cpp, on the same
 * weights and inputs. tools/bench_ggml.sh builds ggml and this program from a checkout of llama.cpp, and runs
 * it.
 *
 * ggml quantizes inputs to 8 bits in each call, as opaq does with precision `fast`; the times include it on
 * both sides. Weights are cold: every call takes the next of several copies. In a round both sides are timed
 * alternately, some calls each; the ratio is the median of the rounds (bench_rounds.h). Each side quantizes the
 * weight by its own rules; its error is that of the result against sums in double of the unquantized weight.
 * ggml has no 8-bit floats: opaq's are compared with its Q8_0. */
#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <ggml-backend.h>
#include <ggml-cpu.h>
#include <ggml.h>

#include "opaq/opaq.h"

#include "bench_numbers.h"
#include "bench_options.h"
#include "bench_rounds.h"
#include "bench_time.h"

enum {
    SIZE = 4096,
    COLD_BYTES = 300 << 20,
    COPY_LIMIT = 64,
    MOST_ROWS = 512,
    TURNS = 2,
    CALLS = 40, /* calls of a side in a turn, at most; a turn ends after enough_seconds */
    CHECKED = 64
};
static const double enough_seconds = 0.02;
static const int row_counts[] = {1, 8, 64, 512};
enum { ROWS_COUNT = sizeof row_counts / sizeof row_counts[0] };

struct peer_case {
    const char *name;
    const char *plan;
    enum ggml_type type;
};
static const struct peer_case cases[] = {
    {"nvfp4 fast : NVFP4", "w=nvfp4+tiled precision=fast", GGML_TYPE_NVFP4},
    {"nvfp4 exact : NVFP4", "w=nvfp4+tiled precision=exact", GGML_TYPE_NVFP4},
    {"mxfp4 fast : MXFP4", "w=mxfp4+tiled precision=fast", GGML_TYPE_MXFP4},
    {"mxfp8 exact : Q8_0", "w=mxfp8+tiled precision=exact", GGML_TYPE_Q8_0},
    {"fp8 exact : Q8_0", "w=fp8+tiled precision=exact", GGML_TYPE_Q8_0},
};
enum { CASE_COUNT = sizeof cases / sizeof cases[0] };

struct settings {
    int rounds;
    int threads;
    const char *only;
    const char *json;
};

static void stop(const char *what) {
    fprintf(stderr, "peer_ggml: %s\n", what);
    exit(1);
}

static void *memory_of(size_t bytes) {
    void *memory;
    if (posix_memalign(&memory, 64, bytes + 64) != 0) {
        stop("no memory");
    }
    return memory;
}

/* ---- the numbers ---- */

struct numbers {
    float *weight; /* SIZE x SIZE */
    float *x;      /* MOST_ROWS x SIZE */
};

static void fill(float *to, int64_t count, float factor, uint64_t seed) {
    uint64_t state = seed;
    for (int64_t i = 0; i < count; ++i) {
        to[i] = factor * nearly_normal(&state);
    }
}

/* Error of the first row's first results: the norm of the difference divided by the norm. */
static double error_of(const float *y, const struct numbers *numbers) {
    double far = 0.0;
    double all = 0.0;
    for (int n = 0; n < CHECKED; ++n) {
        double sum = 0.0;
        for (int k = 0; k < SIZE; ++k) {
            sum += (double)numbers->x[k] * (double)numbers->weight[(int64_t)n * SIZE + k];
        }
        far += (y[n] - sum) * (y[n] - sum);
        all += sum * sum;
    }
    return sqrt(far / all);
}

/* ---- ggml ---- */

struct ggml_side {
    ggml_backend_t backend;
    struct ggml_context *weights;
    struct ggml_context *graphs;
    struct ggml_cgraph *graph[COPY_LIMIT];
    struct ggml_tensor *y[COPY_LIMIT];
    const char *order;
    int copies;
    int next;
};

static void ignore_message(enum ggml_log_level level, const char *text, void *data) {
    (void)level, (void)text, (void)data;
}

static ggml_backend_buffer_type_t repacked_buffers(void) {
    ggml_backend_dev_t device = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
    ggml_backend_reg_t registry = device == NULL ? NULL : ggml_backend_dev_backend_reg(device);
    ggml_backend_dev_get_extra_bufts_t get =
        registry == NULL ? NULL
                         : (ggml_backend_dev_get_extra_bufts_t)ggml_backend_reg_get_proc_address(
                               registry, "ggml_backend_dev_get_extra_bufts");
    for (ggml_backend_buffer_type_t *one = get == NULL ? NULL : get(device); one != NULL && *one != NULL;
         ++one) {
        if (strcmp(ggml_backend_buft_name(*one), "CPU_REPACK") == 0) {
            return *one;
        }
    }
    return NULL;
}

/* Sets the number of rows of x; the weights do not change. */
static void ggml_side_rows(struct ggml_side *side, const struct numbers *numbers, int rows) {
    struct ggml_init_params params = {
        (size_t)(side->copies + 4) * (ggml_graph_overhead_custom(8, false) + 4096), NULL, true};
    struct ggml_tensor *weight = ggml_get_first_tensor(side->weights);
    ggml_free(side->graphs);
    side->graphs = ggml_init(params);
    struct ggml_tensor *x = ggml_new_tensor_2d(side->graphs, GGML_TYPE_F32, SIZE, rows);
    for (int i = 0; i < side->copies; ++i) {
        side->y[i] = ggml_mul_mat(side->graphs, weight, x);
        side->graph[i] = ggml_new_graph_custom(side->graphs, 8, false);
        ggml_build_forward_expand(side->graph[i], side->y[i]);
        weight = ggml_get_next_tensor(side->weights, weight);
    }
    if (ggml_backend_alloc_ctx_tensors(side->graphs, side->backend) == NULL) {
        stop("ggml has no memory");
    }
    ggml_backend_tensor_set(x, numbers->x, 0, (size_t)rows * SIZE * sizeof(float));
}

static struct ggml_side ggml_side_make(const struct peer_case *from, const struct numbers *numbers,
                                       int threads) {
    struct ggml_side side = {.backend = ggml_backend_cpu_init(), .order = "as it is"};
    const size_t bytes = ggml_row_size(from->type, SIZE) * SIZE;
    side.copies = (int)(COLD_BYTES / bytes) + 1;
    struct ggml_init_params params = {(size_t)(side.copies + 1) * ggml_tensor_overhead(), NULL, true};
    side.weights = ggml_init(params);
    for (int i = 0; i < side.copies; ++i) {
        (void)ggml_new_tensor_2d(side.weights, from->type, SIZE, SIZE);
    }
    ggml_backend_cpu_set_n_threads(side.backend, threads);
    ggml_backend_buffer_type_t buffers = repacked_buffers(); /* in ggml's repacked order for products */
    struct ggml_tensor *first = ggml_get_first_tensor(side.weights);
    ggml_backend_buffer_t made =
        buffers == NULL ? NULL : ggml_backend_alloc_ctx_tensors_from_buft(side.weights, buffers);
    if (made != NULL && first->extra != NULL) {
        side.order = "repacked";
    } else { /* ggml has no repacked order for this type */
        ggml_backend_buffer_free(made);
        ggml_free(side.weights);
        side.weights = ggml_init(params);
        for (int i = 0; i < side.copies; ++i) {
            (void)ggml_new_tensor_2d(side.weights, from->type, SIZE, SIZE);
        }
        if (ggml_backend_alloc_ctx_tensors(side.weights, side.backend) == NULL) {
            stop("ggml has no memory");
        }
    }
    void *codes = memory_of(bytes);
    (void)ggml_quantize_chunk(from->type, numbers->weight, codes, 0, SIZE, SIZE, NULL);
    for (struct ggml_tensor *w = ggml_get_first_tensor(side.weights); w != NULL;
         w = ggml_get_next_tensor(side.weights, w)) {
        ggml_backend_tensor_set(w, codes, 0, bytes);
    }
    free(codes);
    return side;
}

static double ggml_side_time(struct ggml_side *side) {
    side->next = (side->next + 1) % side->copies;
    const double start = now();
    if (ggml_backend_graph_compute(side->backend, side->graph[side->next]) != GGML_STATUS_SUCCESS) {
        stop("ggml failed");
    }
    return now() - start;
}

/* ---- opaq ---- */

struct opaq_side {
    int64_t runner[COPY_LIMIT];
    struct opaq_runner_info info;
    struct opaq_tensor x;
    struct opaq_tensor y;
    struct opaq_span workspace;
    int copies;
    int next;
};

static struct opaq_tensor matrix(float *data, int64_t rows) {
    return (struct opaq_tensor){
        .data = data, .dtype = OPAQ_DTYPE_F32, .rank = 2, .shape = {rows, SIZE}, .strides = {SIZE, 1}};
}

static void check(enum opaq_status status, const struct opaq_error *error) {
    if (status != OPAQ_OK) {
        stop(error->text);
    }
}

static struct opaq_side opaq_side_make(const struct peer_case *from, const struct numbers *numbers,
                                       const struct opaq_parallel *parallel) {
    struct opaq_side side = {.copies = 1};
    const struct opaq_execution execution = {.parallel = parallel};
    struct opaq_error error;
    const int64_t shape[2] = {SIZE, SIZE};
    const struct opaq_tensor weight = matrix(numbers->weight, SIZE);
    const struct opaq_value values[OPAQ_OP_ARGUMENT_LIMIT] = {
        {0},
        {.tensors = &weight, .count = 1},
        {0},
        {.sizes = shape, .count = 2},
        {.text = from->plan, .count = (int64_t)strlen(from->plan)}};
    for (int i = 0; i < side.copies; ++i) {
        check(opaq_runner_create(opaq_op_find("linear"), values, &execution, &side.runner[i], &error), &error);
        check(opaq_runner_query(side.runner[i], &side.info, &error), &error);
        side.copies = (int)(COLD_BYTES / side.info.bytes) + 1;
    }
    return side;
}

static void opaq_side_rows(struct opaq_side *side, const struct numbers *numbers, float *y, int rows) {
    struct opaq_error error;
    side->x = matrix(numbers->x, rows);
    side->y = matrix(y, rows);
    free(side->workspace.data);
    check(opaq_runner_workspace(side->runner[0], &side->x, 1, &side->workspace.bytes, &error), &error);
    side->workspace.data = memory_of(side->workspace.bytes);
}

static double opaq_side_time(struct opaq_side *side, const struct opaq_parallel *parallel) {
    const struct opaq_execution execution = {.parallel = parallel};
    struct opaq_error error;
    const double start = now();
    check(opaq_runner_run(side->runner[side->next++ % side->copies], &side->x, 1, &side->y, side->workspace,
                          &execution, &error),
          &error);
    return now() - start;
}

/* ---- the program ---- */

/* Until the threads of one side sleep, before the other side runs. */
static void pause_for_threads(void) {
    const struct timespec a_while = {0, 10000000};
    (void)nanosleep(&a_while, NULL);
}

struct sides {
    struct ggml_side theirs;
    struct opaq_side ours;
    const struct opaq_parallel *parallel;
};

static double one_side(struct sides *sides, bool is_ours) {
    double best = 0.0;
    double spent = 0.0;
    pause_for_threads();
    for (int i = 0; i < CALLS && spent < enough_seconds; ++i) {
        const double seconds =
            is_ours ? opaq_side_time(&sides->ours, sides->parallel) : ggml_side_time(&sides->theirs);
        best = i == 0 ? seconds : smaller(best, seconds);
        spent += seconds;
    }
    return best;
}

static void run_case(const struct peer_case *from, const struct numbers *numbers, const struct settings *s,
                     int threads, const struct opaq_parallel *parallel, FILE *json, bool *is_first) {
    struct sides sides = {ggml_side_make(from, numbers, threads), opaq_side_make(from, numbers, parallel),
                          parallel};
    float *const y = memory_of(sizeof(float) * MOST_ROWS * SIZE);
    static struct rounds rounds;
    for (int r = 0; r < ROWS_COUNT; ++r) {
        const int rows = row_counts[r];
        ggml_side_rows(&sides.theirs, numbers, rows);
        opaq_side_rows(&sides.ours, numbers, y, rows);
        rounds.count = 0;
        for (int round = -1; round < s->rounds; ++round) { /* round -1 warms up */
            for (int turn = 0; turn < TURNS; ++turn) {
                const double theirs = one_side(&sides, false);
                const double ours = one_side(&sides, true);
                if (round >= 0) {
                    rounds_turn(&rounds, turn, ours, theirs);
                }
            }
        }
        double spread;
        const double ours = rounds_best(&rounds, &spread);
        const struct figure ratio = rounds_figure(&rounds, 1.0, false);
        float theirs[CHECKED];
        ggml_backend_tensor_get(sides.theirs.y[sides.theirs.next], theirs, 0, sizeof theirs);
        const double error_theirs = error_of(theirs, numbers);
        const double error_ours = error_of(y, numbers);
        printf("%-20s %4d %2d %10.1f %10.1f %7.2f %5.2f-%5.2f %8.4f %8.4f  %s, %s\n", from->name, rows, threads,
               ours * 1e6, ours * ratio.minima * 1e6, ratio.value, ratio.low, ratio.high, error_ours,
               error_theirs, from->plan, sides.theirs.order);
        fflush(stdout);
        if (json != NULL) {
            fprintf(json,
                    "%s\n    {\"case\": \"%s\", \"m\": %d, \"n\": %d, \"k\": %d, \"threads\": %d, "
                    "\"seconds\": %.9f, \"ggml_seconds\": %.9f, \"ratio\": %.4f, ",
                    *is_first ? "" : ",", from->name, rows, SIZE, SIZE, threads, ours, ours * ratio.minima,
                    ratio.value);
            figure_json(json, &ratio);
            fprintf(json, ", \"error\": %.6f, \"ggml_error\": %.6f, \"plan\": \"%s\", \"ggml_order\": \"%s\"}",
                    error_ours, error_theirs, from->plan, sides.theirs.order);
            *is_first = false;
        }
    }
    for (int i = 0; i < sides.ours.copies; ++i) {
        (void)opaq_runner_destroy(sides.ours.runner[i], NULL);
    }
    free(sides.ours.workspace.data);
    free(y);
    ggml_free(sides.theirs.graphs);
    ggml_free(sides.theirs.weights);
    ggml_backend_free(sides.theirs.backend);
}

static void usage(FILE *stream) {
    fprintf(stream, "usage: peer_ggml [options]\n"
                    "Times y = x w^T, w 4096 x 4096, beside ggml; the ratio is ggml's time over opaq's.\n\n"
                    "  --rounds N     rounds of each case, at most 100 (default 10)\n"
                    "  --threads N    0 for one per processor (default 0)\n"
                    "  --only TEXT    only cases whose name contains TEXT\n"
                    "  --json FILE    also write the figures as JSON\n");
}

int main(int argc, char **argv) {
    struct settings s = {10, 0, "", NULL};
    const struct bench_option options[] = {
        {"--rounds", &s.rounds, 1, ROUND_LIMIT, NULL},
        {"--threads", &s.threads, 0, 1024, NULL},
        {"--only", NULL, 0, 0, &s.only},
        {"--json", NULL, 0, 0, &s.json},
    };
    bench_options_read(argc, argv, "peer_ggml", usage, options, sizeof options / sizeof options[0]);
    struct opaq_pool *pool;
    struct opaq_error error;
    char features[128];
    bool is_first = true;
    ggml_log_set(ignore_message, NULL);
    check(opaq_pool_create(s.threads, &pool, &error), &error);
    const struct opaq_parallel parallel = opaq_pool_parallel(pool);
    const int threads = opaq_pool_threads(pool);
    const struct numbers numbers = {memory_of(sizeof(float) * SIZE * SIZE),
                                    memory_of(sizeof(float) * MOST_ROWS * SIZE)};
    fill(numbers.weight, (int64_t)SIZE * SIZE, 0.02f, 1);
    fill(numbers.x, (int64_t)MOST_ROWS * SIZE, 1.0f, 2);
    FILE *json = s.json == NULL ? NULL : fopen(s.json, "w");
    if (s.json != NULL && json == NULL) {
        stop("the JSON file cannot be written");
    }
    (void)opaq_cpu_describe(opaq_cpu_features(), features, sizeof features);
    printf("opaq %s, ggml %s (%s), %d rounds, cpu: %s\n\n", opaq_version(), ggml_version(), ggml_commit(),
           s.rounds, features);
    printf("%-20s %4s %2s %10s %10s %7s %11s %8s %8s  %s\n", "opaq : ggml", "M", "T", "opaq us", "ggml us",
           "ratio", "quartiles", "error", "ggml's", "plan, ggml's order");
    if (json != NULL) {
        fprintf(json, "{\n  \"version\": \"%s\", \"ggml\": \"%s %s\", \"cpu\": \"%s\", \"results\": [",
                opaq_version(), ggml_version(), ggml_commit(), features);
    }
    for (int i = 0; i < CASE_COUNT; ++i) {
        if (strstr(cases[i].name, s.only) != NULL) {
            run_case(&cases[i], &numbers, &s, threads, &parallel, json, &is_first);
        }
    }
    if (json != NULL) {
        fprintf(json, "\n  ]\n}\n");
        if (fclose(json) != 0) {
            stop("the JSON file cannot be written");
        }
    }
    free(numbers.weight);
    free(numbers.x);
    opaq_pool_destroy(pool);
    return 0;
}
