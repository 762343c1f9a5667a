/* cli/report/job_summary.h: the summary of a job, as text and as JSON. */
#ifndef OPAQ_CLI_REPORT_JOB_SUMMARY_H
#define OPAQ_CLI_REPORT_JOB_SUMMARY_H

#include "cli/write/checkpoint_job.h"

/* Lists the files and their tensors, for --dry-run; grouped, one line for those whose names differ in numbers only. */
void job_print_manifest(const struct checkpoint_job *job, bool is_grouped);

/* `path` is the destination. */
void job_print_summary(const struct checkpoint_job *job, const char *path, bool is_dry);
enum exit_code job_print_json(const struct command_call *call, const struct checkpoint_job *job,
                              const char *path, bool is_dry);

#endif
