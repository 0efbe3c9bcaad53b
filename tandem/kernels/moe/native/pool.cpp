#include "pool.h"

#include <sched.h>
#include <signal.h>
#include <unistd.h>

#include <cstring>
#include <stdexcept>

namespace tandem {
namespace {

constexpr std::int64_t kBarrierSpinNs = 300000;     // phases of one job end within microseconds of each other
constexpr std::int64_t kSharedBarrierSpinNs = 20000;  // the same where others want the cores: who is late may be waiting for one
constexpr std::int64_t kLookForDeadNs = 200000000;  // how often a waiting caller asks whether all threads live

int cpu_count(const std::vector<std::vector<int>>& cpus) {
  std::set<int> all;
  for (const auto& some : cpus) {
    if (some.empty()) return static_cast<int>(sysconf(_SC_NPROCESSORS_ONLN));
    all.insert(some.begin(), some.end());
  }
  return static_cast<int>(all.size());
}

}  // namespace

Pool::Pool(const std::vector<std::vector<int>>& cpus, std::int64_t spin_ns)
    : workers_(cpus.size()), pin_errors_(cpus.size()), spin_ns_(spin_ns), process_(getpid()) {
  if (cpus.empty()) throw std::runtime_error("a pool needs at least one thread");
  for (const auto& some : cpus)
    if (some.size() == 1) pinned_.insert(some.front());
  crowded_ = cpu_count(cpus) < threads();
  if (crowded_) spin_ns_ = 0;
  running_ = threads();
  for (std::size_t i = 0; i < workers_.size(); i++) {
    Worker& worker = workers_[i];
    worker.pool = this;
    worker.index = static_cast<int>(i);
    worker.cpus = cpus[i];
    worker.alive = true;
    const int problem = pthread_create(&worker.thread, nullptr, start, &worker);
    if (problem != 0) {
      worker.alive = false;
      const std::string why = std::strerror(problem);
      for (std::size_t k = i; k < workers_.size(); k++) workers_[k].pool = nullptr;  // never started
      stop();
      throw std::runtime_error("thread " + std::to_string(i) + " of " + std::to_string(cpus.size()) +
                               " cannot start: " + why);
    }
  }
  await_all();
}

Pool::~Pool() { stop(); }

void Pool::stop() {
  if (process_ != getpid()) return;  // a fork has the memory but not the threads
  stopping_ = true;
  begin_.open();
  for (Worker& worker : workers_)
    if (worker.pool != nullptr) pthread_join(worker.thread, nullptr);
}

void Pool::run(const Job& job) {
  const std::lock_guard<std::mutex> turn(turn_);
  if (process_ != getpid()) throw std::runtime_error("the pool's threads belong to another process");
  if (failed_) throw std::runtime_error(error_);
  job_ = &job;
  running_ = threads();
  begin_.open();
  await_all();
  job_ = nullptr;
  if (failed_) {
    const std::lock_guard<std::mutex> lock(error_lock_);
    throw std::runtime_error(error_);
  }
}

void Pool::await_all() {
  const int cpu = sched_getcpu();
  const bool may_spin = !crowded_ && pinned_.count(cpu) == 0;
  for (;;) {
    const std::uint32_t done = done_.value();
    if (running_.load(std::memory_order_acquire) <= 0) return;
    done_.wait(done, may_spin ? spin_ns_ : 0, kLookForDeadNs);
    if (done_.value() == done) find_dead();
  }
}

// A dead thread will end no job: count it out, and let those that wait for it go.
void Pool::find_dead() {
  for (Worker& worker : workers_)
    if (!worker.alive.exchange(true)) {
      fail("thread " + std::to_string(worker.index) + " of the pool is dead");
      running_.fetch_sub(1);
    }
}

void Pool::fail(const std::string& why) {
  {
    const std::lock_guard<std::mutex> lock(error_lock_);
    if (error_.empty()) error_ = why;
  }
  failed_ = true;
  meet_.open();
}

bool Pool::barrier() {
  const std::uint32_t phase = meet_.value();
  if (failed_.load()) return false;
  if (waiting_.fetch_add(1, std::memory_order_acq_rel) + 1 == threads()) {
    waiting_.store(0, std::memory_order_relaxed);
    meet_.open();
  } else {
    meet_.wait(phase, crowded_ ? 0 : spin_ns_ == 0 ? kSharedBarrierSpinNs : kBarrierSpinNs);
  }
  return !failed_.load();
}

void Pool::end_job() {
  if (running_.fetch_sub(1, std::memory_order_acq_rel) == 1) done_.open();
}

void* Pool::start(void* argument) {
  Worker& worker = *static_cast<Worker*>(argument);
  struct Alive {  // whatever ends the thread
    std::atomic<bool>& flag;
    ~Alive() { flag = false; }
  } alive{worker.alive};
  // signals are the process's own affair
  sigset_t all;
  sigfillset(&all);
  pthread_sigmask(SIG_BLOCK, &all, nullptr);
  pthread_setname_np(pthread_self(), ("tandem-" + std::to_string(worker.index)).c_str());
  worker.pool->work(worker);
  return nullptr;
}

void Pool::work(Worker& worker) {
  pin_errors_[static_cast<std::size_t>(worker.index)] = pin(worker.cpus);
  std::uint32_t seen = 0;
  end_job();
  for (;;) {
    begin_.wait(seen, spin_ns_);
    seen = begin_.value();
    if (stopping_ || worker.killed) return;
    Member member(*this, worker.index);
    try {
      (*job_)(member);
    } catch (const std::exception& error) {
      fail("thread " + std::to_string(worker.index) + " of the pool failed: " + error.what());
    }
    end_job();
  }
}

std::string Pool::pin(const std::vector<int>& cpus) {
  if (cpus.empty()) return "";
  const std::size_t most = 1 << 16;  // CPUs that a mask can hold
  cpu_set_t* set = CPU_ALLOC(most);
  const std::size_t bytes = CPU_ALLOC_SIZE(static_cast<int>(most));
  CPU_ZERO_S(bytes, set);
  std::string names;
  for (const int cpu : cpus) {
    CPU_SET_S(static_cast<std::size_t>(cpu), bytes, set);
    names += (names.empty() ? "" : ",") + std::to_string(cpu);
  }
  const int problem = pthread_setaffinity_np(pthread_self(), bytes, set);
  CPU_FREE(set);
  return problem == 0 ? "" : "CPUs " + names + ": " + std::strerror(problem);
}

}  // namespace tandem
