// Threads that compute experts: each may be pinned, all run one job together, and wait for the next between jobs.
#pragma once

#include <pthread.h>
#include <sys/types.h>

#include <atomic>
#include <functional>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "gate.h"

namespace tandem {

class Pool {
 public:
  // What a thread of the pool sees of itself during a job.
  class Member {
   public:
    Member(Pool& pool, int index) : pool_(pool), index_(index) {}
    int index() const { return index_; }
    int threads() const { return pool_.threads(); }
    // Waits for all threads. False: a thread has failed or died, so return from the job.
    bool barrier() { return pool_.barrier(); }

   private:
    Pool& pool_;
    int index_;
  };
  using Job = std::function<void(Member&)>;

  // One thread for each entry of `cpus`: the CPUs it may run on; empty: any. A thread spins for `spin_ns` after a job
  // before it sleeps. Throws std::runtime_error if a thread cannot start.
  Pool(const std::vector<std::vector<int>>& cpus, std::int64_t spin_ns);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int threads() const { return static_cast<int>(workers_.size()); }

  // Each thread's reason for not being where it should be; empty strings where all is well.
  const std::vector<std::string>& pin_errors() const { return pin_errors_; }

  // Runs `job` on every thread and returns when all have ended. Callers take turns. Throws std::runtime_error when a
  // thread threw or is dead; the pool is of no use after that.
  void run(const Job& job);

  // For tests: the thread ends as if it had been killed, without a word, when the next job reaches it.
  void kill(int index) { workers_[static_cast<std::size_t>(index)].killed = true; }

 private:
  struct Worker {
    pthread_t thread{};
    Pool* pool = nullptr;
    int index = 0;
    std::vector<int> cpus;
    std::atomic<bool> alive{false};
    std::atomic<bool> killed{false};
  };

  static void* start(void* worker);
  void work(Worker& worker);
  bool barrier();
  void end_job();
  void fail(const std::string& why);
  void await_all();
  void find_dead();
  void stop();
  static std::string pin(const std::vector<int>& cpus);

  std::vector<Worker> workers_;
  std::vector<std::string> pin_errors_;
  std::int64_t spin_ns_;
  bool crowded_ = false;  // more threads than CPUs: spinning would only keep others from running
  std::set<int> pinned_;  // CPUs that are a thread's only one: a caller that runs there does not spin
  pid_t process_;

  std::mutex turn_;
  const Job* job_ = nullptr;
  bool stopping_ = false;
  Gate begin_, done_, meet_;
  std::atomic<int> waiting_{0}, running_{0};
  std::atomic<bool> failed_{false};
  std::mutex error_lock_;
  std::string error_;
};

}  // namespace tandem
