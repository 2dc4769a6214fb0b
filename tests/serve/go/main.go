// The Go client against the server at os.Args[1]. Prints a line "ok NAME" or "FAILED NAME: why" for each scenario that
// the other arguments name, or for all.
package main

import (
	"context"
	"fmt"
	"os"
	"reflect"
	"sort"
	"strconv"
	"strings"
	"sync"
	"time"

	rocketmq "github.com/apache/rocketmq-client-go/v2"
	"github.com/apache/rocketmq-client-go/v2/consumer"
	"github.com/apache/rocketmq-client-go/v2/primitive"
	"github.com/apache/rocketmq-client-go/v2/producer"
	"github.com/apache/rocketmq-client-go/v2/rlog"
)

var (
	server primitive.NsResolver
	sender rocketmq.Producer
	all    = consumer.MessageSelector{}
	done   = context.Background()
)

func main() {
	rlog.SetLogLevel("error")
	server = primitive.NewPassthroughResolver([]string{os.Args[1]})
	sender, _ = rocketmq.NewProducer(
		producer.WithNsResolver(server), producer.WithGroupName("go"), producer.WithQueueSelector(producer.NewHashQueueSelector()))
	check(sender.Start())
	for _, each := range []struct {
		name string
		run  func() string
	}{
		{"send", send}, {"push", push}, {"filters", filters}, {"order", order}, {"delay", delay}, {"retry", retry},
		{"pull", pull}, {"transactions", transactions},
	} {
		if len(os.Args) > 2 && !contains(os.Args[2:], each.name) {
			continue
		}
		if wrong := each.run(); wrong == "" {
			fmt.Println("ok " + each.name)
		} else {
			fmt.Println("FAILED " + each.name + ": " + wrong)
		}
	}
	os.Exit(0)
}

func check(err error) {
	if err != nil {
		panic(err)
	}
}

func contains(names []string, name string) bool {
	for _, each := range names {
		if each == name {
			return true
		}
	}
	return false
}

func until(seconds int, done func() bool) bool {
	for end := time.Now().Add(time.Duration(seconds) * time.Second); !done(); time.Sleep(20 * time.Millisecond) {
		if time.Now().After(end) {
			return false
		}
	}
	return true
}

// Texts that consumers have seen.
type texts struct {
	sync.Mutex
	seen []string
}

func (t *texts) add(text string) {
	t.Lock()
	defer t.Unlock()
	t.seen = append(t.seen, text)
}

func (t *texts) sorted() []string {
	t.Lock()
	defer t.Unlock()
	seen := append([]string{}, t.seen...)
	sort.Strings(seen)
	return seen
}

func push1(group, instance string, order bool) rocketmq.PushConsumer {
	member, err := rocketmq.NewPushConsumer(
		consumer.WithNsResolver(server), consumer.WithGroupName(group), consumer.WithInstance(instance),
		consumer.WithConsumeFromWhere(consumer.ConsumeFromFirstOffset), consumer.WithConsumerOrder(order))
	check(err)
	return member
}

func collect(member rocketmq.PushConsumer, topic string, selector consumer.MessageSelector) *texts {
	seen := &texts{}
	check(member.Subscribe(topic, selector, func(_ context.Context, messages ...*primitive.MessageExt) (consumer.ConsumeResult, error) {
		for _, message := range messages {
			seen.add(string(message.Body))
		}
		return consumer.ConsumeSuccess, nil
	}))
	check(member.Start())
	return seen
}

func message(topic, tag, body string) *primitive.Message {
	return primitive.NewMessage(topic, []byte(body)).WithTag(tag)
}

func send() string {
	if result, err := sender.SendSync(done, message("gosends", "a", "sync")); err != nil || result.Status != primitive.SendOK {
		return fmt.Sprint("sync ", result, err)
	}
	var sent sync.WaitGroup
	for i := 0; i < 50; i++ {
		sent.Add(1)
		check(sender.SendAsync(done, func(_ context.Context, _ *primitive.SendResult, err error) {
			check(err)
			sent.Done()
		}, message("gosends", "a", "async"+strconv.Itoa(i))))
	}
	sent.Wait()
	for i := 0; i < 10; i++ {
		check(sender.SendOneWay(done, message("gosends", "a", "oneway"+strconv.Itoa(i))))
	}
	var batch []*primitive.Message
	for i := 0; i < 10; i++ {
		batch = append(batch, message("gosends", "b", "batch"+strconv.Itoa(i)))
	}
	if result, err := sender.SendSync(done, batch...); err != nil || result.Status != primitive.SendOK {
		return fmt.Sprint("batch ", result, err)
	}
	return ""
}

func push() string {
	member := push1("gopush", "push", false)
	seen := collect(member, "gosends", all)
	if !until(30, func() bool { return len(seen.sorted()) >= 71 }) {
		return fmt.Sprint(len(seen.sorted()), " of 71")
	}
	_, err := sender.SendSync(done, message("gosends", "a", "while it waits"))
	check(err)
	if !until(10, func() bool { return len(seen.sorted()) == 72 }) {
		return "a waiting pull was not answered"
	}
	check(member.Shutdown())
	return ""
}

func filters() string {
	for i := 0; i < 9; i++ {
		sent := message("gofilters", "t"+strconv.Itoa(i%3), "m"+strconv.Itoa(i))
		sent.WithProperty("n", strconv.Itoa(i))
		sent.WithKeys([]string{"k" + strconv.Itoa(i)})
		_, err := sender.SendSync(done, sent)
		check(err)
	}
	tags, sql := push1("gotags", "tags", false), push1("gosql", "sql", false)
	byTag := collect(tags, "gofilters", consumer.MessageSelector{Type: consumer.TAG, Expression: "t1 || t2"})
	bySQL := collect(sql, "gofilters", consumer.MessageSelector{Type: consumer.SQL92, Expression: "n > 6 AND TAGS <> 't1'"})
	until(20, func() bool { return len(byTag.sorted()) >= 6 && len(bySQL.sorted()) >= 1 })
	check(tags.Shutdown())
	check(sql.Shutdown())
	if !reflect.DeepEqual(byTag.sorted(), []string{"m1", "m2", "m4", "m5", "m7", "m8"}) || !reflect.DeepEqual(bySQL.sorted(), []string{"m8"}) {
		return fmt.Sprint(byTag.sorted(), bySQL.sorted())
	}
	return ""
}

func order() string {
	for i := 0; i < 60; i++ {
		key := strconv.Itoa(i % 3)
		_, err := sender.SendSync(done, message("goorder", "a", key+":"+strconv.Itoa(i)).WithShardingKey(key))
		check(err)
	}
	seen, refused := &texts{}, sync.Map{}
	var members []rocketmq.PushConsumer
	for _, name := range []string{"order1", "order2"} {
		member := push1("goorder", name, true)
		check(member.Subscribe("goorder", all, func(_ context.Context, messages ...*primitive.MessageExt) (consumer.ConsumeResult, error) {
			if _, known := refused.LoadOrStore(string(messages[0].Body), 1); !known && string(messages[0].Body) == "1:1" {
				return consumer.SuspendCurrentQueueAMoment, nil
			}
			for _, each := range messages {
				seen.add(string(each.Body))
			}
			return consumer.ConsumeSuccess, nil
		}))
		check(member.Start())
		members = append(members, member)
	}
	came := until(90, func() bool { return len(seen.sorted()) >= 60 })
	for _, member := range members {
		check(member.Shutdown())
	}
	last := map[string]int{}
	for _, text := range seen.seen {
		parts := strings.Split(text, ":")
		number, _ := strconv.Atoi(parts[1])
		if before, known := last[parts[0]]; known && before >= number {
			return fmt.Sprint("out of order: ", seen.seen)
		}
		last[parts[0]] = number
	}
	if !came {
		return fmt.Sprint("not all: ", len(seen.seen))
	}
	return ""
}

func delay() string {
	member := push1("godelay", "delay", false)
	begin := time.Now()
	_, err := sender.SendSync(done, message("godelays", "a", "later").WithDelayTimeLevel(2))
	check(err)
	seen := collect(member, "godelays", all)
	came := until(30, func() bool { return len(seen.sorted()) > 0 })
	check(member.Shutdown())
	if !came || time.Since(begin) < 4990*time.Millisecond {
		return fmt.Sprint(came, time.Since(begin))
	}
	return ""
}

func retry() string {
	_, err := sender.SendSync(done, message("goretries", "a", "bad"))
	check(err)
	seen := &texts{}
	member := push1("goretries", "retry", false)
	check(member.Subscribe("goretries", all, func(ctx context.Context, messages ...*primitive.MessageExt) (consumer.ConsumeResult, error) {
		concurrent, _ := primitive.GetConcurrentlyCtx(ctx)
		concurrent.DelayLevelWhenNextConsume = 1
		seen.add(messages[0].Topic + strconv.Itoa(int(messages[0].ReconsumeTimes)))
		if messages[0].ReconsumeTimes == 0 {
			return consumer.ConsumeRetryLater, nil
		}
		return consumer.ConsumeSuccess, nil
	}))
	check(member.Start())
	until(60, func() bool { return len(seen.sorted()) >= 2 })
	check(member.Shutdown())
	if !reflect.DeepEqual(seen.sorted(), []string{"goretries0", "goretries1"}) {
		return fmt.Sprint(seen.sorted())
	}
	return ""
}

func pull() string {
	member, err := rocketmq.NewPullConsumer(
		consumer.WithNsResolver(server), consumer.WithGroupName("gopull"), consumer.WithInstance("pull"),
		consumer.WithConsumeFromWhere(consumer.ConsumeFromFirstOffset))
	check(err)
	check(member.Subscribe("gosends", all))
	check(member.Start())
	seen := map[string]bool{}
	until(60, func() bool {
		if found, err := member.Poll(done, time.Second); err == nil {
			for _, each := range found.GetMsgList() {
				seen[string(each.Body)] = true
			}
			member.ACK(done, found, consumer.ConsumeSuccess)
		}
		return len(seen) >= 72
	})
	check(member.Shutdown())
	if len(seen) != 72 {
		return fmt.Sprint(len(seen), " of 72")
	}
	return ""
}

type till struct{ checks texts }

func (*till) ExecuteLocalTransaction(message *primitive.Message) primitive.LocalTransactionState {
	return map[string]primitive.LocalTransactionState{
		"commit": primitive.CommitMessageState, "rollback": primitive.RollbackMessageState, "unknown": primitive.UnknowState,
	}[string(message.Body)]
}

func (t *till) CheckLocalTransaction(message *primitive.MessageExt) primitive.LocalTransactionState {
	t.checks.add(string(message.Body))
	return primitive.CommitMessageState
}

func transactions() string {
	listener := &till{}
	// All producers of a process share one client, and checks go to the first one, unless the instance differs.
	transactional, err := rocketmq.NewTransactionProducer(
		listener, producer.WithNsResolver(server), producer.WithGroupName("gotill"), producer.WithInstanceName("till"))
	check(err)
	check(transactional.Start())
	for _, text := range []string{"commit", "rollback", "unknown"} {
		_, err := transactional.SendMessageInTransaction(done, message("gopaid", "a", text))
		check(err)
	}
	member := push1("gopaid", "paid", false)
	seen := collect(member, "gopaid", all)
	until(60, func() bool { return len(seen.sorted()) >= 2 })
	check(transactional.Shutdown())
	check(member.Shutdown())
	if !reflect.DeepEqual(seen.sorted(), []string{"commit", "unknown"}) || len(listener.checks.sorted()) != 1 {
		return fmt.Sprint(seen.sorted(), listener.checks.sorted())
	}
	return ""
}
