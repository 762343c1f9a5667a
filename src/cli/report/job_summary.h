/* cli/report/job_summary.h: the summary of a job, as text and as JSON. */
#ifndef OPAQ_CLI_REPORT_JOB_SUMMARY_H
#define OPAQ_CLI_REPORT_JOB_SUMMARY_H

#include "cli/write/checkpoint_job.h"

/* Lists every tensor of every file, for --dry-run. */
void job_print_plan(const struct checkpoint_job *job);

/* `path` is the destination. */
void job_print_summary(const struct checkpoint_job *job, const char *path, bool is_dry);
enum exit_code job_print_json(const struct command_call *call, const struct checkpoint_job *job,
                              const char *path, bool is_dry);

#endif
